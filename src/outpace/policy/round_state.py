"""The state of the controller "auto" in one round: its options, look-up drafts and choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from outpace.core.request import Request
from outpace.draft.round import DrafterChoice, LookupDraft
from outpace.policy.candidate import Trial
from outpace.policy.estimator import RoundRequests
from outpace.policy.forecast import RoundComparison


@dataclass
class RoundOption:
    """What might be drafted in the coming round for the requests that measured times decide."""

    picks: dict[Request, DrafterChoice]
    tokens: float  # of all these requests
    seconds: float | None  # of the round; None while they are not known
    trials: dict[str, Trial | None] = field(default_factory=dict)  # by those that draft

    @property
    def rate(self) -> float | None:
        """Tokens per second; None while it is not known."""
        return None if self.seconds is None else self.tokens / self.seconds


@dataclass
class RoundState:
    """What is known and decided of the present round, from its plan to its record."""

    chosen: RoundOption | None = None
    asked: frozenset[Request] = frozenset()
    """For whom a drafter that drafts alone was asked: it may have nothing to draft."""
    models: Mapping[Request, str] = field(default_factory=dict)
    """By request, the model that was asked among several drafters: it may draft nothing, too."""
    lookup_drafts: Mapping[Request, Mapping[str, LookupDraft]] = field(default_factory=dict)
    """By request, what each look-up has found."""
    comparisons: dict[str, dict[Request, RoundComparison]] = field(default_factory=dict)
    """By model and request, the round with the model and without it."""


def no_picks(batch: RoundRequests) -> dict[Request, DrafterChoice]:
    """Returns that nothing is drafted for any of the adaptive requests."""
    return dict.fromkeys(batch.adaptive, DrafterChoice())
