"""Draws the picture of README.md: tokens per second of each program, plain and with drafts.

    python lab/headline.py RUN.json --out docs/pictures/headline

RUN.json: what ``outpace bench run --json`` wrote, with the methods "plain" and "auto" and other programs
(``--vs``). Of a program's ways to draft the fastest is shown. Writes OUT-light.svg and OUT-dark.svg.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

PROGRAMS = {
    "outpace": ("plain", "auto"),
    "ik_llama.cpp": ("ik_llamacpp", "ik_llamacpp-speculative"),
    "OpenVINO GenAI": ("openvino", "openvino-speculative"),
    "llama.cpp": ("llamacpp", "llamacpp-speculative"),
    "transformers": ("hf", "hf-assisted"),
}
"""How each program's plain method is called in a run, and how the names of those begin that draft."""

COLOURS = {
    "light": {"ink": "#1f2328", "faint": "#d1d9e0", "plain": "#9aa4b2", "drafts": "#1a7f64"},
    "dark": {"ink": "#e6edf3", "faint": "#30363d", "plain": "#6e7681", "drafts": "#3fb68b"},
}


def main() -> None:
    ask = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ask.add_argument("run", type=Path)
    ask.add_argument("--out", required=True)
    given = ask.parse_args()
    speeds = read(json.loads(given.run.read_text(encoding="utf-8")))
    for theme, colours in COLOURS.items():
        draw(speeds, colours, Path(f"{given.out}-{theme}.svg"))


def read(report) -> dict[str, tuple[float, float | None]]:
    """Returns each program's tokens per second, plain and with drafts, the fastest program first."""
    (cell,) = report["cells"]
    of = {method["name"]: method["tokens_per_second"] for method in cell["methods"]}
    speeds = {}
    for program, (plain, drafting) in PROGRAMS.items():
        if plain in of:
            found = [speed for name, speed in of.items() if name.startswith(drafting)]
            speeds[program] = (of[plain], max(found, default=None))
    return dict(sorted(speeds.items(), key=lambda entry: -max(filter(None, entry[1]))))


def draw(speeds, colours, path: Path) -> None:
    with plt.rc_context(
        {"svg.hashsalt": "outpace", "font.family": "DejaVu Sans", "svg.fonttype": "path"}
    ):
        figure, axes = plt.subplots(figsize=(7.2, 0.62 * len(speeds) + 0.9))
        for place, (plain, drafts) in enumerate(speeds.values()):
            bars = [(-0.19, plain, "plain"), (0.19, drafts, "drafts")]
            for offset, speed, kind in bars if drafts else [(0, plain, "plain")]:
                axes.barh(place + offset, speed, 0.36, color=colours[kind])
                label = f" {speed:.1f}"
                axes.text(
                    speed, place + offset, label, va="center", color=colours["ink"], fontsize=9
                )
        axes.set_yticks(range(len(speeds)), speeds, fontsize=10)
        axes.invert_yaxis()
        axes.set_xlabel("tokens per second", color=colours["ink"], fontsize=9)
        axes.tick_params(colors=colours["ink"], length=0)
        axes.spines[:].set_visible(False)
        axes.xaxis.grid(True, color=colours["faint"], linewidth=0.6)
        axes.set_axisbelow(True)
        for kind, label in (("plain", "plain"), ("drafts", "with drafts")):
            axes.barh([0], [0], color=colours[kind], label=label)
        axes.legend(frameon=False, labelcolor=colours["ink"], fontsize=9, loc="lower right")
        figure.tight_layout()
        figure.savefig(path, transparent=True, metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    main()
