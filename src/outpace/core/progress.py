"""Progress reports of long work: the current step, and the share of the whole that is done."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Is called with what is being done, and how much of the whole is done, from 0 to 1."""


def silent(*_: object) -> None:
    """Reports nothing."""


def part(whole: Progress, begin: float, end: float, whose: str = "") -> Progress:
    """Returns what a part of the work reports to, which takes the whole from ``begin`` to ``end``.
    whose: is put before each step.

    >>> part(lambda *told: print(told), 0.5, 1.0, "draft model")("reading the weights", 0.5)
    ('draft model: reading the weights', 0.75)
    """
    prefix = f"{whose}: " if whose else ""
    return lambda step, done: whole(prefix + step, begin + (end - begin) * done)


def rising(report: Progress) -> Progress:
    """Returns the same for work whose parts do not know of each other: the share never falls.

    >>> told = rising(lambda *told: print(told))
    >>> told("one", 0.5), told("another", 0.1)
    ('one', 0.5)
    ('another', 0.5)
    (None, None)
    """
    reached = 0.0

    def told(step: str, done: float) -> None:
        nonlocal reached
        reached = max(reached, done)
        report(step, reached)

    return told
