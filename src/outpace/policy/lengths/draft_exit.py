"""A confidence threshold that follows the acceptance rate.

Zhang et al. 2024, "Draft & Verify" (arXiv 2309.08168), section 3.4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le

from outpace.core.options import Options
from outpace.core.proposal import EndsAfter
from outpace.core.request import PerRequest, Request
from outpace.draft.exits import FIRST, PAPER, Exit, ThresholdRule, below
from outpace.policy.base import Outcome
from outpace.policy.lengths.base import StoppingPolicy


@dataclass(frozen=True, kw_only=True)
class DraftExitOptions(Options):
    """What a user may set; the defaults are the paper's."""

    threshold: Annotated[float, Ge(0), Le(1)] = FIRST
    """The first threshold: a less likely token ends its chain."""
    target_acceptance: Annotated[float, Ge(0), Le(1)] = PAPER.wanted
    """The acceptance rate below which the threshold rises, and above which it falls."""
    step: Annotated[float, Ge(0), Le(1)] = PAPER.step
    """By how much it rises or falls before it is smoothed."""
    rate_memory: Annotated[float, Ge(0), Le(1)] = PAPER.rate_memory
    """Share of the old acceptance rate that is kept (beta 1)."""
    threshold_memory: Annotated[float, Ge(0), Le(1)] = PAPER.threshold_memory
    """Share of the old threshold that is kept (beta 2)."""


class DraftExit(StoppingPolicy):
    """Ends a chain after a token that has less than a threshold in the drafter's distribution, and
    moves the threshold towards a wanted acceptance rate:

        rate      <- beta_1 rate + (1 - beta_1) accepted / drafted
        threshold <- beta_2 threshold + (1 - beta_2) (threshold + step), or - step if rate is above

    A draft of full length says nothing against the threshold, which is then not lowered, and a
    draft of a look-up that drafts with the model says nothing at all. All requests share one
    threshold, except sampled ones with a seed of their own.
    """

    name: ClassVar[str] = "draft_exit"
    usual: ClassVar[int] = 12
    Options: ClassVar[type[Any]] = DraftExitOptions

    def __init__(self, count: int, options: Any) -> None:
        super().__init__(count, options)
        first = Exit(options.threshold)
        self._states = PerRequest(lambda request: first, lasting=True, common=first)
        self._watched: set[Request] = set()  # rows of the present round
        self._rule = ThresholdRule(
            options.target_acceptance, options.step, options.rate_memory, options.threshold_memory
        )

    def threshold(self, request: Request) -> float:
        """Returns the present threshold of a request."""
        return self._states[request].threshold

    def ending(self, requests: Sequence[Request]) -> Callable[[Sequence[int]], EndsAfter]:
        thresholds = [self.threshold(request) for request in requests]
        self._watched = watched = set[Request]()

        def begin(counts: Sequence[int]) -> EndsAfter:
            pairs = zip(requests, counts, strict=True)
            watched.update(request for request, count in pairs if count)
            return below(thresholds)

        return begin

    def learn(self, request: Request, outcome: Outcome) -> None:
        if request not in self._watched:  # a look-up drafted, whose tokens no threshold ends
            return
        whole = outcome.drafted >= self.count
        exit = self._states[request]
        moved = exit.after(self._rule, outcome.drafted, outcome.accepted, whole)
        self._states[request] = moved
