"""The files that a measurement writes, whatever was measured: checked before it, written after it.
JSON, Markdown, one HTML page that holds its figures and fetches nothing, the figures by themselves,
and a run's texts in Spec-Bench's answer format (its question files are read by `prompts`)."""

from __future__ import annotations

import base64
import json
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from outpace.bench.contest import TimedRun
from outpace.bench.costs import CostReport
from outpace.bench.plots import figures, require_matplotlib
from outpace.bench.results import UNEXPLAINED, Report
from outpace.bench.session import Finished
from outpace.bench.summary import SettingRuns
from outpace.bench.table import markdown
from outpace.core.extras import extra
from outpace.core.text_decoder import TextDecoder
from outpace.errors import ConfigError
from outpace.files import replacing


@dataclass(frozen=True)
class OutputFiles:
    """Where to write what; None for what is not wanted."""

    json: Path | None = None
    html: Path | None = None
    png: Path | None = None
    """A folder: one image per figure."""
    markdown: Path | None = None
    spec_bench: Path | None = None
    """A folder: one answer file per method, batch size and temperature."""

    def check(self, read: Iterable[Path] = ()) -> None:
        """Raises ``ConfigError`` for a place that cannot be written to or a package that is
        missing, so that a long run is not lost for it. read: files that are read, which stay."""
        written = {"--json": self.json, "--html": self.html, "--markdown": self.markdown}
        check_distinct(written, read)
        for flag, file in written.items():
            check_file(flag, file)
        check_folder("--png", self.png)
        check_folder("--spec-bench", self.spec_bench)
        if self.html is not None:
            require_jinja()
        if self.html is not None or self.png is not None:
            require_matplotlib()

    def write(self, found: Finished | CostReport) -> None:
        """Writes what was measured: the page with its numbers before anything is drawn, and once
        more with the figures. A figure that cannot be drawn costs none of the results.

        Raises ``ConfigError`` before anything is written where `Report.check` does.
        """
        report: Report | CostReport = found if isinstance(found, CostReport) else found.report
        text = report.to_json()
        if self.json is not None:
            write_text(self.json, text + "\n")
        if isinstance(found, Finished):
            if self.markdown is not None:
                write_text(self.markdown, markdown(found.report))
            if self.spec_bench is not None:
                _write_answers(self.spec_bench, found)
        if self.html is not None:
            write_text(self.html, html_page(report, {}))
        drawn = self.html is not None or self.png is not None
        made: dict[str, bytes] = figures(report) if drawn else {}
        if self.html is not None:
            write_text(self.html, html_page(report, made))
        if self.png is not None:
            self.png.mkdir(parents=True, exist_ok=True)
            for name, png in made.items():
                (self.png / f"{name}.png").write_bytes(png)


def check_file(flag: str, file: Path | None) -> None:
    """Raises ``ConfigError`` where a file cannot be written; what is in it stays."""
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        is_new = not file.exists()
        file.open("a").close()
        if is_new:
            file.unlink()
    except OSError as error:
        raise ConfigError(
            f"{flag}: cannot write {file} ({error.strerror}): name another file."
        ) from error


def check_distinct(written: Mapping[str, Path | None], read: Iterable[Path]) -> None:
    """Raises ``ConfigError`` for a file that would be written twice, or over one that is read.
    written: by their flags."""
    taken = dict.fromkeys((file.resolve() for file in read), "is read, too")
    for flag, file in written.items():
        if file is None:
            continue
        if (place := file.resolve()) in taken:
            raise ConfigError(f"{flag}: {str(file)!r} {taken[place]}: name another file.")
        taken[place] = f"is written by {flag}, too"


def check_folder(flag: str, folder: Path | None) -> None:
    """Raises ``ConfigError`` where no file can be made in a folder; makes the folder."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"{flag}: cannot write into {folder} ({error.strerror}): name another folder."
        ) from error


def write_text(path: Path, text: str) -> None:
    """Writes a file, and makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


# -- pages -------------------------------------------------------------------------------------


def require_jinja() -> None:
    """Raises ``ConfigError`` with the remedy where jinja2 is not installed."""
    _jinja()


def html_page(report: Report | CostReport, figures: Mapping[str, bytes]) -> str:
    """Returns the page of a benchmark run, or of measured cost curves.

    figures: PNG images by name, of which those that the page knows are shown. Raises
    ``ConfigError`` where `Report.check` does.
    """
    if isinstance(report, CostReport):
        return _rendered("cost.html.j2", report=report, figures=_embedded(figures))
    report.check()
    return _rendered(
        "report.html.j2", report=report, figures=_embedded(figures), unexplained=UNEXPLAINED
    )


def _embedded(figures: Mapping[str, bytes]) -> dict[str, str]:
    return {
        name: "data:image/png;base64," + base64.b64encode(png).decode()
        for name, png in figures.items()
    }


def _rendered(template: str, **values: Any) -> str:
    jinja = _jinja()
    folder = files("outpace.bench") / "templates"
    environment = jinja.Environment(
        loader=jinja.DictLoader({f.name: f.read_text("utf-8") for f in folder.iterdir()}),
        autoescape=True,
        undefined=jinja.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    html: str = environment.get_template(template).render(**values)
    return html


def _jinja() -> Any:
    return extra("jinja2", "an HTML report", "outpace[bench]")


# -- Spec-Bench's answers: new_tokens, wall_time, accept_lengths -------------------------------


@dataclass(frozen=True)
class Answer:
    """The answer to one question's first turn."""

    question_id: str
    category: str
    model_id: str
    text: str
    new_tokens: int
    wall_time: float
    decoding_steps: int | None
    """Passes of the target; None where the program does not say."""
    accept_lengths: tuple[int, ...]
    """Tokens of each target pass, the bonus or correction included, in no particular order.
    Empty where the program does not say."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the line as Spec-Bench writes it."""
        steps = self.decoding_steps
        return {
            "question_id": self.question_id,
            "category": self.category,
            "model_id": self.model_id,
            "choices": [
                {
                    "index": 0,
                    "turns": [self.text],
                    "decoding_steps": [] if steps is None else [steps],
                    "new_tokens": [self.new_tokens],
                    "wall_time": [self.wall_time],
                    "accept_lengths": list(self.accept_lengths),
                }
            ],
        }


def accept_lengths(accepted: Sequence[int], passes: int) -> tuple[int, ...]:
    """Returns how many tokens each target pass gave, in ascending order.

    accepted: how many passes accepted a draft to depth 1 or deeper, to depth 2 or deeper, and so
    on. passes: all passes, also those that accepted nothing.

    >>> accept_lengths([2, 1], passes=3)
    (1, 2, 3)
    """
    reached = [passes, *accepted, 0]
    lengths: list[int] = []
    for depth in range(len(accepted) + 1):
        lengths += [depth + 1] * (reached[depth] - reached[depth + 1])
    return tuple(lengths)


def answers(runs: SettingRuns, name: str, model: str, tokenizer: Any) -> list[Answer]:
    """Returns a contestant's answers to all prompts, from its first repeat of each job.

    The wall time of a text in a batch is the time of the whole batch.
    """
    decoder = TextDecoder(tokenizer)
    return [
        _answer(runs, run, row, model, decoder)
        for run in runs.of(name)
        if run.repeat == 0
        for row in range(len(run.made.texts))
    ]


def _answer(runs: SettingRuns, run: TimedRun, row: int, model: str, decoder: TextDecoder) -> Answer:
    prompt, text = runs.prompts[run.job][row], run.made.texts[row]
    metrics: Sequence[Any] = run.made.metrics
    own = metrics[row] if metrics else None
    lengths: tuple[int, ...] = ()  # another program does not report the passes of its target
    if own is not None:
        lengths = accept_lengths(own.accepted_per_position, own.num_target_passes)
    return Answer(
        question_id=prompt.id,
        category=prompt.task,
        model_id=f"{model}/{run.contestant}",
        text=decoder.text(text),
        new_tokens=len(text),
        wall_time=run.seconds,
        decoding_steps=None if own is None else len(lengths),
        accept_lengths=lengths,
    )


def write_answers(path: Path, answers: Iterable[Answer]) -> None:
    """Writes one line per answer."""
    lines = [json.dumps(answer.as_dict(), ensure_ascii=False) for answer in answers]
    write_text(path, "\n".join(lines) + "\n")


def _write_answers(folder: Path, done: Finished) -> None:
    for setting in done.settings:
        result = setting.result
        for method in result.methods:
            found = answers(
                setting.runs, method.name, done.report.provenance["model"], done.tokenizer
            )
            # A method's name may hold options, and those spaces and slashes.
            name = re.sub(r"[^\w.=+-]+", "-", method.name).strip("-")
            file = f"{name}-b{result.batch}-t{result.temperature:g}.jsonl"
            write_answers(folder / file, found)
