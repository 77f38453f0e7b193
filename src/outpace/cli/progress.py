"""Progress on standard error: a spinner or a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.spinner import Spinner
from rich.text import Text

from outpace.core.progress import silent

EVERY = 5.0
"""Seconds between two lines."""

Report = Callable[[str, float], None]
"""Adds to a text what is being done, and how much of it is done (0 to 1)."""


@contextmanager
def working(
    console: Console, text: str, shown: bool = True, lines: bool = True
) -> Iterator[Report]:
    """Shows that something is done while the block runs: a spinner on a terminal, without one a
    line every few seconds, or nothing where ``lines`` are not wanted."""
    if shown and console.is_terminal:
        # Not console.status, which first draws from a thread that an import may keep waiting.
        spinner = Spinner("dots", Text(f"{text} ..."))  # no markup: a folder may be called "[a]"
        with Live(spinner, console=console, transient=True):
            yield lambda step, done: spinner.update(text=Text(f"{text}: {step} ({done:.0%}) ..."))
    elif shown and lines:
        now = [f"{text} ..."]
        with _lines(console, lambda seconds: f"{now[0]} ({_time(seconds)} so far)"):
            yield lambda step, done: now.__setitem__(0, f"{text}: {step} ({done:.0%}) ...")
    else:
        yield silent


def in_quarters(console: Console, text: str) -> Report:
    """Returns a function that prints a line for each quarter of a step: for what is reported
    without a terminal also where it takes no seconds."""
    said: set[tuple[str, int]] = set()

    def report(step: str, done: float) -> None:
        quarter = int(4 * done)
        if (step, quarter) not in said:
            said.add((step, quarter))
            console.print(f"{text}: {step} ({done:.0%})", markup=False)

    return report


class Steps(ABC):
    """Shows how many of a command's steps are done, and how long the others will take."""

    @abstractmethod
    def expect(self, total: int, done: int = 0) -> None:
        """Sets the number of all steps, as far as it is known. done: those of an earlier run."""

    @abstractmethod
    def at(self, count: int, what: str) -> None:
        """Sets how many steps are done, those of an earlier run among them. what: a few words on
        the last one."""

    @abstractmethod
    def done(self, what: str) -> None:
        """Counts one step more."""

    @abstractmethod
    def say(self, line: str) -> None:
        """Writes a line that stays."""

    def counted(self, what: str, total: int) -> None:
        """Counts one step more of a number that only now may be known."""
        self.expect(total)
        self.done(what)


@contextmanager
def counting(console: Console, name: str, end: float | None = None) -> Iterator[Steps]:
    """Shows steps while the block runs: a bar on a terminal, without one a line every few seconds.

    name: of the command, with which lines begin. end: when the command ends by itself, however many
    steps are done by then, by ``time.monotonic``; None: after the last step only.
    """
    if console.is_terminal:
        with _bar(console, end) as bar:
            yield _Bar(bar)
        return
    steps = _Lines(console, name, end)
    with _lines(console, steps.line):
        yield steps
    steps.say(steps.line(time.monotonic() - steps.begin))


class TimeLeft(ProgressColumn):
    """The time to the last step or, where the command ends before that, to its end."""

    max_refresh = 0.5

    def __init__(self, end: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """end: by the clock; None: there is none but the last step."""
        super().__init__()
        self._end, self._clock = end, clock

    def render(self, task: Task) -> Text:
        left = _sooner(task.time_remaining, self._end, self._clock())
        shown = "-:--:--" if left is None else str(timedelta(seconds=math.ceil(left)))
        return Text(shown, style="progress.remaining")


def _sooner(estimate: float | None, end: float | None, now: float) -> float | None:
    """Returns the seconds to whichever comes first; None where neither is known."""
    allowed = None if end is None else max(0.0, end - now)
    return min((each for each in (estimate, allowed) if each is not None), default=None)


def _bar(console: Console, end: float | None) -> Progress:
    return Progress(
        TextColumn("{task.description:24}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeLeft(end),
        console=console,
        transient=True,
        # Drawing is work too: rarely enough that no measurement notices.
        refresh_per_second=1,
        redirect_stdout=False,  # which may be a file
    )


class _Bar(Steps):
    """On a terminal."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("starting", total=None)

    def expect(self, total: int, done: int = 0) -> None:
        self._bar.update(self._task, total=total)
        if done:
            self._bar.update(self._task, completed=done)

    def at(self, count: int, what: str) -> None:
        self._bar.update(self._task, completed=count, description=what)

    def done(self, what: str) -> None:
        self._bar.update(self._task, advance=1, description=what)

    def say(self, line: str) -> None:
        self._bar.console.print(line, highlight=False, markup=False, soft_wrap=True)


class _Lines(Steps):
    """Without a terminal, where no line can change."""

    def __init__(self, console: Console, name: str, end: float | None) -> None:
        self._console, self._name, self._end = console, name, end
        self._total, self._before, self._count, self._what = 0, 0, 0, "starting"
        self._first: tuple[int, float] | None = None
        """How many steps were done at first, and when. What came before them, loading a model for
        example, says nothing about how long a step takes."""
        self.begin = time.monotonic()

    def expect(self, total: int, done: int = 0) -> None:
        self._total, self._before = total, done or self._before

    def at(self, count: int, what: str) -> None:
        before, seconds = self._since_first(), time.monotonic() - self.begin
        self._count, self._what = count - self._before, what
        if self._count and self._first is None:
            self._first = self._count, seconds
        if self._since_first() and not before:  # from now on there is an estimate
            self.say(self.line(seconds))

    def _since_first(self) -> int:
        return self._count - self._first[0] if self._first is not None else 0

    def done(self, what: str) -> None:
        self.at(self._before + self._count + 1, what)

    def say(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def line(self, seconds: float) -> str:
        """Returns how far it is, and how long the rest will take if it goes on as it did."""
        of = f" of {self._total}" if self._total else ""
        count = self._before + self._count
        line = f"{self._name}: {count}{of} steps ({self._what}), {_time(seconds)} so far"
        rest, known = self._total - count, self._since_first()
        if self._first is not None and known and rest > 0:
            left = (seconds - self._first[1]) * rest / known
            line += f", about {_time(_sooner(left, self._end, time.monotonic()) or 0)} left"
        return line


@contextmanager
def _lines(console: Console, line: Callable[[float], str]) -> Iterator[None]:
    """Writes a line every few seconds while the block runs, from a thread: what the block does may
    take long between two steps. line: is given the seconds since the beginning."""
    ended, begin = threading.Event(), time.monotonic()

    def write() -> None:
        while not ended.wait(EVERY):
            text = line(time.monotonic() - begin)
            console.print(text, markup=False, highlight=False, soft_wrap=True)

    writer = threading.Thread(target=write, name="outpace-progress", daemon=True)
    writer.start()
    try:
        yield
    finally:
        ended.set()
        writer.join()


def _time(seconds: float) -> str:
    """Returns a time as a person says it.

    >>> _time(8.4), _time(200), _time(8000)
    ('8 s', '3 min 20 s', '2 h 13 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
