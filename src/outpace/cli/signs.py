"""Signs of life on standard error: a spinner or a bar on a terminal, without one a line every few
seconds."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from rich.console import Console
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.spinner import Spinner
from rich.text import Text

EVERY = 5.0
"""Seconds between two lines."""


@contextmanager
def working(
    console: Console, text: str, shown: bool = True, lines: bool = True
) -> Iterator[Callable[[str, float], None]]:
    """Shows that something is done while the block runs: a spinner on a terminal, without one a
    line every few seconds, or nothing where ``lines`` are not wanted.

    Yields a function that adds to the text what is being done, and how much of it is done (0 to 1).
    """
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
        yield lambda step, done: None


class Steps(ABC):
    """Shows how many of a command's steps are done, and how long the others will take."""

    @abstractmethod
    def expect(self, total: int, done: int = 0) -> None:
        """Is told the number of all steps, as far as it is known. done: those of an earlier run."""

    @abstractmethod
    def done(self, what: str) -> None:
        """Is told that one more step is done, with a few words on it."""

    @abstractmethod
    def say(self, line: str) -> None:
        """Writes a line that stays."""


@contextmanager
def counting(console: Console, name: str) -> Iterator[Steps]:
    """Shows steps while the block runs: a bar on a terminal, without one a line every few seconds.

    name: of the command, with which lines begin.
    """
    if console.is_terminal:
        with _bar(console) as bar:
            yield _Bar(bar)
        return
    steps = _Lines(console, name)
    with _lines(console, steps.line):
        yield steps
    steps.say(steps.line(perf_counter() - steps.begin))


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:24}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
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

    def done(self, what: str) -> None:
        self._bar.update(self._task, advance=1, description=what)

    def say(self, line: str) -> None:
        self._bar.console.print(line, highlight=False, markup=False, soft_wrap=True)


class _Lines(Steps):
    """Without a terminal, where no line can change."""

    def __init__(self, console: Console, name: str) -> None:
        self._console, self._name = console, name
        self._total, self._before, self._count, self._what = 0, 0, 0, "starting"
        self.begin = perf_counter()

    def expect(self, total: int, done: int = 0) -> None:
        self._total, self._before = total, done or self._before

    def done(self, what: str) -> None:
        self._count, self._what = self._count + 1, what
        if self._count == 1:  # from now on there is an estimate
            self.say(self.line(perf_counter() - self.begin))

    def say(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def line(self, seconds: float) -> str:
        """Returns how far it is, and how long the rest will take if it goes on as it did."""
        of = f" of {self._total}" if self._total else ""
        count = self._before + self._count
        line = f"{self._name}: {count}{of} steps ({self._what}), {_time(seconds)} so far"
        left = self._total - count
        if self._count and left > 0:
            line += f", about {_time(seconds * left / self._count)} left"
        return line


@contextmanager
def _lines(console: Console, line: Callable[[float], str]) -> Iterator[None]:
    """Writes a line every few seconds while the block runs, from a thread: what the block does may
    take long between two steps. line: is given the seconds since the beginning."""
    ended, begin = threading.Event(), perf_counter()

    def write() -> None:
        while not ended.wait(EVERY):
            text = line(perf_counter() - begin)
            console.print(text, markup=False, highlight=False, soft_wrap=True)

    writer = threading.Thread(target=write, name="outpace-signs", daemon=True)
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
