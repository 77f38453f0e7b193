"""``outpace tune``: fits drafters to a model and prompts of your own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from outpace.cli.flags import options as opt
from outpace.cli.flags.grouped import flag_of, grouped
from outpace.cli.flags.groups import ModelFlags
from outpace.cli.flags.prompts import read_prompts
from outpace.cli.flags.speculation import parse_object
from outpace.cli.loading import load_llm
from outpace.cli.progress import counting, working
from outpace.cli.signals import sigterm_as_ctrl_c
from outpace.core.extras import extra
from outpace.core.params import SamplingParams
from outpace.errors import ConfigError
from outpace.files import holds_records, replacing

if TYPE_CHECKING:
    from outpace.methods.self_speculation.skipped_layers import SkippedLayers
    from outpace.tune.layers import LayerSearch

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="markdown",
    no_args_is_help=True,
    help="Fit a drafter to your own model and prompts.",
)

Prompts = Annotated[
    list[Path] | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help="Texts of the kind that will be continued: a text file, or *.jsonl or *.json with "
        '{"prompt": ...} records. May be given several times. Unset: a few built in.',
    ),
]

MOST_NODES, MOST_LEVELS = 64, 16
"""The largest trees that may be looked for."""

TRIED = {"method": "layer_skip", "num_speculative_tokens": 6, "draft_exit": None}
"""How the trials speculate: rounds with drafts of six tokens show what shorter ones bring."""


@app.callback()
def tune() -> None:
    """Fit a drafter to your own model and prompts."""


@app.command()
@grouped
@sigterm_as_ctrl_c()
def layers(
    *,
    model: ModelFlags,
    prompts: Prompts = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="Where the layers are written.")
    ] = Path("layers.json"),
    trials: Annotated[int, typer.Option(min=1, help="Choices to try, in all.")] = 100,
    study: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where the search is kept, to be resumed. Unset: next to --out, as *.study.",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=8, help="Longest text of a prompt.")] = 48,
    at_most: Annotated[
        int, typer.Option("--at-most", min=1, help="Prompts to use of those given.")
    ] = 6,
    temperature: Annotated[float, flag_of(SamplingParams, "temperature")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the search.")] = 0,
) -> None:
    """Find the sub-layers that a model can leave out when it drafts for itself.

    Each trial leaves out other attention and MLP parts, runs rounds on the prompts and predicts the
    tokens per second. Ctrl-C or SIGTERM keeps what was found, and the same command goes on from
    there.

    `outpace tune layers -m big-model --prompts mine.jsonl --out layers.json`

    Then: `--speculative-config '{"method": "layer_skip", "layers": "layers.json"}'`
    """
    texts = _prompts_for(prompts or (), out, at_most)
    kept_in = study or out.with_suffix(".study")
    if kept_in.resolve() == out.resolve():
        raise ConfigError(
            f"{str(out)!r} would be the file of the layers and of the search at once: name another "
            "file with --study or --out."
        )
    extra("optuna", "a search for layers", "outpace[tune]")
    engine = {**model.arguments(), "speculative_config": TRIED}
    llm, _ = load_llm(model.model, engine, {}, texts=1)

    from outpace.draft.fingerprint import Fingerprint
    from outpace.tune.layers import LayerSearch, LayerTrials

    played = LayerTrials(llm, texts, max_tokens, temperature or 0.0)
    search = LayerSearch(played, Fingerprint.of(llm.target), kept_in, seed)
    complete = _search(search, trials)
    found = search.chosen()
    if found is None:
        raise ConfigError("no trial has ended yet, and nothing was written: run it longer.")
    found.save(out)
    _conclude(found, search, out, complete)


def _search(search: LayerSearch, trials: int) -> bool:
    """Searches under a progress bar; returns whether it was not interrupted."""
    with counting(Console(stderr=True), "tune layers") as steps:
        steps.expect(trials, done=min(trials, search.done))
        steps.say(f"plain {search.plain:.1f} tokens/s")

        def report(progress: Any) -> None:
            best = "" if progress.best is None else f", best {progress.best:.1f}"
            steps.done(f"plain {progress.plain:.1f} tokens/s{best}")

        return search.run(trials, report)


def _conclude(found: SkippedLayers, search: LayerSearch, out: Path, complete: bool) -> None:
    facts = found.found
    speed, plain = facts["predicted_tokens_per_second"], facts["plain_tokens_per_second"]
    left = f"{len(found.skipped.attention)} attention and {len(found.skipped.mlp)} MLP parts"
    typer.echo(f"{out}: {left} of {found.model.layers} layers left out, acceptance "
               f"{facts['acceptance']:.2f}, {facts['drafted']} tokens per draft; predicted "
               f"{speed:.1f} tokens/s, plain {plain:.1f} ({speed / plain:.2f}x).")  # fmt: skip
    if speed <= plain:
        typer.echo("None of the choices tried is faster than plain decoding.", err=True)
    if not complete:
        typer.echo(f"Stopped after {search.done} trials; the same command goes on.", err=True)


@app.command()
@grouped
def tree(
    *,
    model: ModelFlags,
    draft: opt.Draft = None,
    speculative_config: opt.SpeculativeJson = None,
    prompts: Prompts = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="Where the drafter's config is written.")
    ] = Path("tree.json"),
    nodes: Annotated[int, typer.Option(min=1, max=MOST_NODES, help="Nodes at most.")] = 24,
    levels: Annotated[int, typer.Option(min=1, max=MOST_LEVELS, help="Levels at most.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=8, help="Longest text of a prompt.")] = 64,
    at_most: Annotated[
        int, typer.Option("--at-most", min=1, help="Prompts to use of those given.")
    ] = 8,
    temperature: Annotated[float, flag_of(SamplingParams, "temperature")] = 0.0,
) -> None:
    """Find the static tree of drafted tokens that is best for a model and its drafter (Sequoia).

    Rounds are run on the prompts to see how often siblings are accepted at each depth, and what
    rounds take; the best tree for that follows by dynamic programming.

    `outpace tune tree -m big-model --draft small-model --prompts mine.jsonl --out tree.json`

    Then: `--speculative-config tree.json`
    """
    texts = _prompts_for(prompts or (), out, at_most)
    config = tree_config(draft, speculative_config)
    engine = {**model.arguments(), "speculative_config": config}
    llm, _ = load_llm(model.model, engine, {}, texts=1)

    from outpace.tune.tree import TreeTrials

    played = TreeTrials(llm, texts, max_tokens, temperature or 0.0)
    with working(Console(stderr=True), "tune tree") as report:
        for share in played.play(nodes, levels):
            report("running rounds", share)
    found = played.best(nodes, levels)
    paths = [list(path) for path in found.shape.paths]
    with replacing(out) as part:
        part.write_text(json.dumps({**config, "branching": paths}) + "\n", encoding="utf-8")
    speed, plain = found.tokens_per_second, found.plain
    typer.echo(f"{out}: {len(paths)} nodes on {found.shape.height} levels, {found.tokens:.2f} "
               f"tokens per pass; predicted {speed:.1f} tokens/s, the best chain "
               f"{found.of_chain:.1f}, plain {plain:.1f} ({speed / plain:.2f}x).")  # fmt: skip
    if speed <= plain:
        typer.echo("No tree is expected to be faster than plain decoding here.", err=True)


def tree_config(draft: str | None, given: str | None) -> dict[str, Any]:
    """Returns the ``speculative_config`` of the drafter whose tree is looked for."""
    if given is None:
        from outpace.heads.checkpoint import find_head_kind

        kind = None if draft is None else find_head_kind(draft)
        named = {} if draft is None else {"model": draft}
        return {"method": kind or "draft_tree", **named}
    if draft is not None:
        raise ConfigError("--speculative-config and --draft exclude each other: put both into it.")
    config = parse_object("--speculative-config", given, ConfigError)
    if "branching" in config:
        raise ConfigError("--speculative-config has a 'branching', which is what is looked for.")
    return config


@app.command()
def router(
    data: Annotated[
        list[str],
        typer.Option(
            "--data",
            metavar="TASK=FILE",
            help="Example prompts of a task: a text file with one per line, or *.jsonl or *.json "
            'with {"prompt": ...} records. Once for each task.',
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="Where the router is written.")
    ] = Path("router.npz"),
    seed: Annotated[int, typer.Option(help="Seed of the split that calibrates it.")] = 0,
) -> None:
    """Train a small classifier that recognises the task of a prompt, for method "task".

    `outpace tune router --data code=code.jsonl --data chat=chat.txt --out router.npz`

    Then: `--speculative-config '{"method": "task", "router": "router.npz", "routes": {...}}'`
    """
    texts: dict[str, list[str]] = {}
    for entry in data:
        task, equals, file = entry.partition("=")
        if not (task and equals and file):
            raise ConfigError(f"--data must be TASK=FILE, not {entry!r}.")
        texts.setdefault(task, []).extend(_texts(Path(file)))
    _check_out(out, [Path(entry.partition("=")[2]) for entry in data])
    from outpace.methods.choosers.classifier import TaskClassifier

    made = TaskClassifier.trained(texts, seed)
    made.save(out)
    share = f"{made.accuracy:.0%}" if made.accuracy is not None else "?"
    typer.echo(
        f"{out}: {len(made.tasks)} tasks ({', '.join(made.tasks)}), {share} of "
        f"{sum(map(len, texts.values()))} prompts recognised when they were left out."
    )


def _prompts_for(files: Sequence[Path], out: Path, at_most: int) -> list[str]:
    """Returns the prompts of the files, or some of different kinds where none are given; raises
    ``ConfigError`` where what is found cannot be written to ``out``."""
    from outpace.bench.builtin import BUILT_IN

    texts = [entry.text for file in files for entry in read_prompts(None, file)]
    _check_out(out, files)
    return (texts or list({task: text for _, task, text in BUILT_IN}.values()))[:at_most]


def _check_out(out: Path, inputs: Sequence[Path] = ()) -> None:
    """Raises ``ConfigError`` for a file that cannot be written, before time is spent on it, and for
    one of those that are read."""
    for file in inputs:
        if out.exists() and file.exists() and out.samefile(file):
            raise ConfigError(f"--out: {str(out)!r} is to be read, too: name another file.")
    if not out.parent.is_dir():
        raise ConfigError(f"--out: there is no folder {str(out.parent)!r}.")
    if out.is_dir():
        raise ConfigError(f"--out: {str(out)!r} is a folder: name a file, such as one in it.")
    from outpace.bench.outputs import check_file

    check_file("--out", out)


def _texts(file: Path) -> list[str]:
    entries = [entry.text for entry in read_prompts(None, file)]
    if holds_records(file):
        return entries
    return [line for text in entries for line in text.splitlines() if line.strip()]
