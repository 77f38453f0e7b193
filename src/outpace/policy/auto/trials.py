"""What is tried although something else promises more: else nobody would learn that it is better,
or has become so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakSet

from outpace.core.request import Request
from outpace.policy.auto.cost import ENOUGH, CostModel, Place
from outpace.policy.auto.history import RowHistory

SHARE = 0.0125
"""The share of all time that may be lost by trying drafts where plain decoding seems best."""

CREDIT = 2.0
"""So much may be lost in addition, at the beginning; in plain rounds."""

OF_TEXT = 0.1
"""The share of a text's own rounds so far that trials in it may lose. Trials are made where they
cost least, in texts with short prompts. Were these not spared, a short answer to a short question
would pay for what all others learn."""

DISTURBED = 4.0
"""The most that one trial counts as lost, in plain rounds: another process may have held it up."""

LOOK_ASIDE = 24
"""After n rounds a width next to the best one is tried, because one bad measurement might
hide that it is better."""

REST = 8
"""Rounds for which a decision against drafting holds while few rows join. Deciding takes a share of
a small model's plain round, and what it follows from hardly changes from one round to the next."""

FEW = 4
"""Few rows have joined where they are one in this many."""


@dataclass(frozen=True)
class Trial:
    """A draft that would be tried."""

    loss: float
    """Plain rounds that it is expected to lose."""
    bearer: RowHistory | None = None
    """The text in which it is made, which is charged for it, if any is."""

    def made(self) -> None:
        """Charges the text: the trial is made."""
        if self.bearer is not None:
            self.bearer.lost += self.loss


class Trials:
    """Drafts where plain decoding seems best: all of them together may lose a small share of the
    time."""

    def __init__(self) -> None:
        self._total = self._loss = 0.0

    def allowed(self, trial: Trial, plain: float) -> bool:
        """Returns whether a trial may be made. plain: seconds of a plain round.

        What a text bears goes by its rounds, not by its tokens: a text that is copied takes few
        rounds for many tokens, and would soon pay for reading a long prompt in vain.
        """
        if self._loss + trial.loss * plain > SHARE * self._total + CREDIT * plain:
            return False
        bearer = trial.bearer
        return bearer is None or bearer.lost + trial.loss <= OF_TEXT * bearer.rounds

    def spend(self, seconds: float) -> None:
        """Learns how long a round took, of which trials may take their share."""
        self._total += seconds

    def enter(self, seconds: float, plain: float, more: float) -> None:
        """Learns how many seconds longer than a plain round a trial took, and how many tokens more
        it brought in each row."""
        loss = min(seconds, (DISTURBED - 1) * plain) - plain * more
        self._loss = max(0.0, self._loss + loss)


class Aside:
    """Looks now and then at what lies beside the best width."""

    def __init__(self) -> None:
        self._since = 0

    def choose(self, best: int, beside: Sequence[int], costs: CostModel, place: Place) -> int:
        """Returns the best width, or now and then one of those beside it: the one that was measured
        least, or longest ago."""
        if not beside:
            return best
        trust = {width: min(ENOUGH, costs.times_measured(place, width)) for width in beside}
        # On plain rounds everything depends: they are looked at twice as often as each other kind.
        ages = {width: costs.age(place, width) * (1 if width else 2) for width in beside}
        width = min(beside, key=lambda each: (trust[each], -ages[each]))
        self._since += 4 if costs.is_doubted(place, width) else 1
        if self._since < LOOK_ASIDE:
            return best
        self._since = 0
        return width


@dataclass
class Rest:
    """A decision against drafting, for some rounds."""

    place: Place
    rows: WeakSet[Request]
    rounds: int = REST

    def lasts(self, place: Place, free: Sequence[Request]) -> bool:
        """Whether it still holds for the coming round."""
        self.rounds -= 1
        if not self.rounds or place != self.place:
            return False
        return FEW * sum(row not in self.rows for row in free) <= len(free)
