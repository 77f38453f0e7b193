"""``outpace tune``: fits drafters to a model and prompts of your own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outpace.cli.prompts import read_prompts
from outpace.errors import ConfigError

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="markdown",
    no_args_is_help=True,
    help="Fit a drafter to your own model and prompts.",
)


@app.callback()
def tune() -> None:
    """Fit a drafter to your own model and prompts."""


@app.command()
def router(
    data: Annotated[
        list[str],
        typer.Option(
            "--data",
            metavar="TASK=FILE",
            help="Example prompts of a task: a text file with one per line, or *.jsonl with "
            '{"prompt": ...} per line. Once for each task.',
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="Where the router is written.")
    ] = Path("router.npz"),
    seed: Annotated[int, typer.Option(help="Of the parts that it is calibrated on.")] = 0,
) -> None:
    """Train a small classifier that tells the task of a prompt, for method "task".

    `outpace tune router --data code=code.jsonl --data chat=chat.txt --out router.npz`

    Then: `--speculative-config '{"method": "task", "router": "router.npz", "routes": {...}}'`
    """
    texts: dict[str, list[str]] = {}
    for entry in data:
        task, equals, file = entry.partition("=")
        if not (task and equals and file):
            raise ConfigError(f"--data must be TASK=FILE, not {entry!r}.")
        texts.setdefault(task, []).extend(_texts(Path(file)))
    if not out.parent.is_dir():
        raise ConfigError(f"--out: there is no folder {str(out.parent)!r}.")
    from outpace.draft.route.classifier import TaskClassifier

    made = TaskClassifier.trained(texts, seed)
    made.save(out)
    share = f"{made.accuracy:.0%}" if made.accuracy is not None else "?"
    typer.echo(
        f"{out}: {len(made.tasks)} tasks ({', '.join(made.tasks)}), {share} of "
        f"{sum(map(len, texts.values()))} prompts told right when they were left out."
    )


def _texts(file: Path) -> list[str]:
    entries = [entry.text for entry in read_prompts(None, file)]
    if file.suffix == ".jsonl":
        return entries
    return [line for text in entries for line in text.splitlines() if line.strip()]
