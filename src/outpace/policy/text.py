"""The state of one drafter in one request's text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outpace.core.account import DrafterAccount, Reason
from outpace.draft.round import Outcome
from outpace.policy.acceptance import Counts, Ratio
from outpace.policy.exploration import TrialBudget


@dataclass
class Tally:
    """Counts of one drafter's drafts for one request, as in `DrafterAccount`."""

    asked: int = 0
    found: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    _reasons: Counter[Reason] = field(default_factory=Counter)

    def ask(self, found: bool) -> None:
        """Counts a round in which the drafter was asked. found: whether it had a draft."""
        self.asked += 1
        self.found += found

    def count(self, outcome: Outcome, reason: Reason | None = None) -> None:
        """Counts a round. reason: why nothing was drafted in it, if nothing was."""
        self.rounds += outcome.drafted > 0
        self.drafted += outcome.drafted
        self.accepted += outcome.accepted
        if reason is not None and not outcome.drafted:
            self._reasons[reason] += 1

    def account(self, name: str, **known: Any) -> DrafterAccount:
        """Returns the account of the drafter with this name. known: its other fields; a reason
        among them counts where no round had one."""
        reason = known.pop("reason", None)
        if self._reasons:
            reason = self._reasons.most_common(1)[0][0]
        return DrafterAccount(
            name,
            asked=self.asked,
            found=self.found,
            rounds=self.rounds,
            drafted=self.drafted,
            accepted=self.accepted,
            reason=reason,
            **known,
        )


@dataclass
class TextState:
    """What is known of a drafter in one text."""

    counts: Counts
    chains: Counts
    """How far its chains go on, where something ends them."""
    nominal: TrialBudget
    """What its drafts have lost in nominal costs, for reproducible texts."""
    levels: Ratio
    """Levels for each node of its drafts."""
    read: int = 0
    """Tokens that the drafter has seen."""
    rounds: int = 0
    drafted: bool = False
    """Whether it drafted in the last round: then it has read all tokens."""
    lost: float = 0.0
    """Plain rounds that trials in this text were expected to lose."""
    tally: Tally = field(default_factory=Tally)
    expected: tuple[object, Mapping[int, float]] | None = None
    """What each size was last expected to bring, with all that this was computed from."""
