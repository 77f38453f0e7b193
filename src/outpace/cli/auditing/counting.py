"""How long audits of many things show how far they are, and on how many processors they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Workers = Annotated[int, typer.Option(min=0, help="Processes at once. 0: one for each processor.")]


@contextmanager
def counting(console: Console) -> Iterator[Callable[[str, int], None]]:
    """Shows a bar, and gives what is to be called with each thing that is done and with the number
    of all."""
    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task("starting", total=None)

        def count(done: str, total: int) -> None:
            bar.update(task, advance=1, total=total, description=done)

        yield count
