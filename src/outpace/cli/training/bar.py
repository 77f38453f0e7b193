"""The progress bars of `outpace train`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
)
from rich.text import Text

if TYPE_CHECKING:
    from outpace.train.run import Progress as Reached
    from outpace.train.run import TrainingRun


@contextmanager
def counting(console: Console, what: str, total: int, done: int) -> Iterator[Callable[[int], None]]:
    """Shows a bar while the block runs; yields a function that is told how much is done."""
    with _bar(console) as bar:
        task = bar.add_task(what, total=total, completed=done)
        yield lambda count: bar.update(task, completed=count)


def in_lines(console: Console, what: str) -> Callable[[str, float], None]:
    """Returns a function that is told what is being done and which share of it is done, and prints
    a line for each quarter: where there is no terminal, on which a line could change."""
    said = set()

    def report(step: str, done: float) -> None:
        quarter = int(4 * done)
        if (step, quarter) not in said:
            said.add((step, quarter))
            console.print(f"{what}: {step} ({done:.0%})", markup=False)

    return report


def play(
    console: Console,
    run: TrainingRun,
    every: int,
    minutes: float | None,
    patience: int | None,
    draw: Callable[[Reached], None],
) -> Reached:
    """Trains under a bar and returns where the run ended.

    patience: after n reports without a higher figure than before, those of earlier sittings
    among them, the run ends; None: it goes on. every: steps between two reports. minutes: after so
    many the run ends, too; None: never. draw: is called after each report.
    """
    end = None if minutes is None else time.monotonic() + 60 * minutes
    with _bar(console, end) as bar:
        task = bar.add_task("training", total=max(run.settings.steps, run.step), completed=run.step)

        def report(reached: Reached) -> None:
            loss = f"loss {reached.loss:.3f}, " if reached.step else ""
            bar.console.print(
                f"step {reached.step:,}: {loss}{reached.measure.name} {reached.score:.2f}"
            )
            draw(reached)

        def stop() -> bool:
            bar.update(task, completed=run.step)
            return end is not None and time.monotonic() > end

        return run.play(report, every, stop, patience)


class TimeLeft(ProgressColumn):
    """The time to the last step or, where the run ends before that, to the end of its time."""

    max_refresh = 0.5

    def __init__(self, end: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """end: by the clock; None: there is none but the last step."""
        super().__init__()
        self._end, self._clock = end, clock

    def render(self, task: Task) -> Text:
        allowed = None if self._end is None else max(0.0, self._end - self._clock())
        known = [seconds for seconds in (task.time_remaining, allowed) if seconds is not None]
        left = str(timedelta(seconds=math.ceil(min(known)))) if known else "-:--:--"
        return Text(left, style="progress.remaining")


def _bar(console: Console, end: float | None = None) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeLeft(end), console=console)
