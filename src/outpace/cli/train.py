"""``outpace train``: a drafter for one target, trained on given text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outpace.cli.loading import starting, working
from outpace.errors import ConfigError

if TYPE_CHECKING:
    from outpace.train.run import Progress as Reached
    from outpace.train.run import TrainingRun


def train(
    method: Annotated[str, typer.Argument(help="A kind of head, such as medusa or eagle3.")],
    data: Annotated[
        list[Path], typer.Option(help="Training text: .txt or .jsonl. May be given several times.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the head; a run in it goes on.")],
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="ID_OR_PATH", help="The target. Unset: the bundled."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps in all.")] = 1000,
    batch: Annotated[int, typer.Option(help="Blocks of text per step.")] = 4,
    block: Annotated[int, typer.Option(help="Tokens of a block.")] = 256,
    learning_rate: Annotated[float, typer.Option("--lr", help="The highest.")] = 1e-3,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens of text to use at most. Unset: all.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Stop after this time; the same command goes on later.")
    ] = None,
    sizes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=N", help="A size of the head, such as depths=3."),
    ] = None,
    every: Annotated[int, typer.Option(help="Steps between two reports.")] = 50,
    seed: Annotated[int, typer.Option(help="Of the weights and of the order of the text.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Train a head that drafts for one target.

    Each report says how many tokens a pass of the target would bring with the head's guesses, on
    text that it does not learn from. Ctrl-C keeps what the last report wrote.
    """
    console = Console(stderr=True)
    with starting(console):
        from outpace.train.settings import TrainSettings
    settings = TrainSettings(
        method=method,
        block=block,
        batch=batch,
        steps=steps,
        learning_rate=learning_rate,
        seed=seed,
        head=_sizes(sizes or []),
    )
    run = _prepare(console, model, device, data, tokens, settings, out)
    if run.step:
        console.print(f"going on from step {run.step:,} of {steps:,}")
    reached = _play(console, run, every, minutes)
    console.print(
        f"{reached.tokens:,} tokens in {reached.seconds / 60:.1f} minutes; simulated acceptance "
        f"length {reached.acceptance_length:.2f}, by depth "
        + " ".join(f"{share:.0%}" for share in reached.by_depth)
    )
    console.print(f"use it: --method {method} --draft {out}", highlight=False)


def _prepare(
    console: Console,
    model: str | None,
    device: str,
    data: list[Path],
    limit: int | None,
    settings: Any,
    out: Path,
) -> TrainingRun:
    with starting(console):
        from outpace.api import BUNDLED
        from outpace.errors import PromptError
        from outpace.heads.registry import find_head
        from outpace.targets.hf.load import load
        from outpace.train.data import blocks, documents
        from outpace.train.run import TrainingRun
        from outpace.train.settings import head_config
    head_config(find_head(settings.method).Config, settings.head)
    with working(console, f"loading {model or 'the bundled target'}") as report:
        target = load(BUNDLED / "target" if model is None else model, device=device,
                      progress=report)  # fmt: skip
    if target.tokenizer is None:
        raise PromptError(f"{target.name} has no tokenizer, so no text can be read for it.")
    with working(console, "reading the text"):
        texts = documents(data, target.tokenizer, target.name)
        found = blocks(texts, target.tokenizer, settings.block, limit)
    return TrainingRun(target, found, settings, out)


def _play(console: Console, run: TrainingRun, every: int, minutes: float | None) -> Reached:
    import time

    end = None if minutes is None else time.monotonic() + 60 * minutes
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("training", total=run.settings.steps, completed=run.step)

        def report(reached: Reached) -> None:
            bar.console.print(
                f"step {reached.step:,}: loss {reached.loss:.3f}, acceptance length "
                f"{reached.acceptance_length:.2f}"
            )

        def stop() -> bool:
            bar.update(task, completed=run.step)
            return end is not None and time.monotonic() > end

        return run.play(report, every, stop)


def _sizes(given: list[str]) -> Mapping[str, int | bool]:
    """Reads ``NAME=N``; true and false are numbers, too."""
    found: dict[str, int | bool] = {}
    for text in given:
        name, _, value = text.partition("=")
        if value in ("true", "false"):
            found[name] = value == "true"
        elif value.isdigit():
            found[name] = int(value)
        else:
            raise ConfigError(f"--set takes NAME=N, such as depths=3, not {text!r}.")
    return found
