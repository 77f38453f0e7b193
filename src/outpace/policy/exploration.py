"""Trials of drafts that do not seem to pay. Without them a drafter that was judged wrongly, or has
become better, would never be found out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakSet

from outpace.core.request import Request
from outpace.policy.costs import MAX_SAMPLES, BatchBucket

TRIAL_SHARE, INITIAL_CREDIT = 0.01, 0.6
"""What drafts may lose that do not seem to pay: a share of all that was spent, and this many plain
rounds at first (docs/decisions/0004-static-prices.md)."""

MAX_TRIAL_LOSS = 4.0
"""Plain rounds: the most that one trial counts as lost, since another process may have held it up,
and the most gain that is kept to make up for later losses. With 2 replays are 1.001 times as
fast."""

TEXT_TRIAL_SHARE = 0.1
"""The share of a text's own rounds so far that trials in it may lose. Trials are made where they
cost least, in texts with short prompts. Were these not spared, a short answer to a short question
would pay for what all others learn. Without it replays are .950 times as fast, the worst task
.783 (lab/decisions.md, 17)."""


@dataclass
class TrialBudget:
    """A budget for drafts that may lose against plain decoding: a credit at first, and then a share
    of the time of all rounds. However bad a drafter is, drafting loses no more than this budget and
    one draft."""

    credit: float = INITIAL_CREDIT
    spent: float = 0.0
    lost: float = 0.0

    def allows(self, loss: float, plain: float = 1.0) -> bool:
        """Returns whether this much more may be lost. plain: what a plain round costs."""
        return self.lost + loss <= self.credit * plain + TRIAL_SHARE * self.spent

    def enter(self, loss: float, plain: float = 1.0) -> None:
        """Enters what a draft has lost, or gained if that is negative."""
        self.lost = max(-MAX_TRIAL_LOSS * plain, self.lost + loss)

    def renew(self) -> None:
        """Forgets losses: the machine has changed, and what lost on it before may pay now."""
        self.lost = min(self.lost, 0.0)


@dataclass
class Backoff:
    """A decision against drafting that holds for ``rounds`` rounds, unless rows join. Deciding
    takes a noticeable share of a small model's plain round, and its reasons hardly change from one
    round to the next."""

    bucket: BatchBucket
    rows: WeakSet[Request]
    rounds: int = MAX_SAMPLES

    def lasts(self, bucket: BatchBucket, adaptive: Sequence[Request]) -> bool:
        """Returns whether it still holds for the coming round."""
        self.rounds -= 1
        if not self.rounds or bucket != self.bucket:
            return False
        return all(row in self.rows for row in adaptive)
