"""What a draft model saves beside look-ups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from outpace.policy.row import DraftingRow

WEIGHT = 16.0
"""Rounds for which what is known of other texts counts in a new one."""

MEMORY = 0.995
"""How much of what is known of all texts is left after each round."""


@dataclass(frozen=True)
class Way:
    """How a round might go."""

    tokens: float
    """Tokens that the round is expected to bring a row."""
    takes: float
    """Time of the round, in plain rounds."""

    @property
    def rate(self) -> float:
        """Tokens per plain round."""
        return self.tokens / self.takes


@dataclass
class _Sums:
    """What some rounds were expected to bring and to take, without the model and with it."""

    rounds: float = 0.0
    without: Way = Way(0.0, 0.0)
    with_it: Way = Way(0.0, 0.0)

    def add(self, other: _Sums, weight: float = 1.0) -> None:
        """Adds so many times the other's."""
        self.rounds += weight * other.rounds
        self.without = _sum(self.without, other.without, weight)
        self.with_it = _sum(self.with_it, other.with_it, weight)


def _sum(one: Way, other: Way, weight: float) -> Way:
    return Way(one.tokens + weight * other.tokens, one.takes + weight * other.takes)


class Savings:
    """Plain rounds that a draft model saves for each token of a text, beside what look-ups save.

    A draft model reads the text before its first draft, and has to repay that. Where a look-up does
    most of the work, there is little left by which it could. Each round is expected to go in the
    best way without the model and in the best way with it; what a text saves is the difference over
    its rounds so far, and over those of other texts while there are few.
    """

    def __init__(self) -> None:
        self._every = _Sums()
        self._of: WeakKeyDictionary[DraftingRow, _Sums] = WeakKeyDictionary()

    def note(self, request: DraftingRow, others: Sequence[Way], model: Way) -> None:
        """Enters a round of a text, which may go in several ways: with a draft of the model, or in
        one of the others."""
        without = max(others, key=lambda way: way.rate)
        found = _Sums(1.0, without, max(without, model, key=lambda way: way.rate))
        self._every.add(self._every, MEMORY - 1)
        self._every.add(found)
        self._of.setdefault(request, _Sums()).add(found)

    @property
    def known(self) -> bool:
        """Whether any round was entered."""
        return self._every.rounds > 0

    def of(self, request: DraftingRow) -> float:
        """Returns what the model is expected to save for each token of a text, if anything is
        `known`."""
        found = _Sums()
        found.add(self._every, WEIGHT / self._every.rounds)
        found.add(self._of.get(request, _Sums()))
        return 1 / found.without.rate - 1 / found.with_it.rate
