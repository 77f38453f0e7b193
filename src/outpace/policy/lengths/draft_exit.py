"""A confidence threshold that follows the acceptance rate.

Zhang et al. 2024, "Draft & Verify" (arXiv 2309.08168), section 3.4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from outpace.draft.options import option
from outpace.policy.base import Outcome
from outpace.policy.lengths.base import ByRequest, StoppingPolicy, check_number
from outpace.policy.lengths.confidence import of
from outpace.policy.row import DraftingRow


@dataclass(frozen=True, kw_only=True)
class DraftExitOptions:
    """What a user may set; the defaults are the paper's."""

    threshold: float = option(0.6, "The first threshold: a less likely token ends its chain.")
    target_acceptance: float = option(
        0.9, "The acceptance rate below which the threshold rises, and above which it falls."
    )
    step: float = option(0.01, "By how much it rises or falls before it is smoothed.")
    rate_memory: float = option(0.5, "Share of the old acceptance rate that is kept (beta 1).")
    threshold_memory: float = option(0.9, "Share of the old threshold that is kept (beta 2).")

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_number("draft_exit", name, value, 0, 1)


@dataclass(frozen=True)
class _State:
    threshold: float
    rate: float | None = None  # accepted / drafted, smoothed; None before the first round


class DraftExit(StoppingPolicy):
    """Ends a chain behind a token that has less than a threshold in the drafter's law, and moves
    the threshold towards a wanted acceptance rate:

        rate      <- beta_1 rate + (1 - beta_1) accepted / drafted
        threshold <- beta_2 threshold + (1 - beta_2) (threshold + step), or - step if rate is above

    A draft of full length says nothing against the threshold, which is then not lowered. All
    requests share one threshold, except sampled ones with a seed of their own.
    """

    name: ClassVar[str] = "draft_exit"
    usual: ClassVar[int] = 12
    Options: ClassVar[type[Any]] = DraftExitOptions

    def __init__(self, count: int, options: Any, invariant: bool) -> None:
        super().__init__(count, options, invariant)
        self._states = ByRequest(_State(options.threshold), invariant, pooled=True)

    def threshold(self, request: DraftingRow) -> float:
        """Returns the present threshold of a request."""
        return self._states.of(request).threshold

    def ending(self, requests: Sequence[DraftingRow]) -> Callable[[Tensor, Tensor], Tensor]:
        thresholds = [self.threshold(request) for request in requests]
        return lambda law, token: of(law, token) < law.new_tensor(thresholds)

    def learn(self, request: DraftingRow, outcome: Outcome) -> None:
        options, old = self.options, self._states.of(request)
        rate, kept = outcome.accepted / outcome.drafted, options.rate_memory
        if old.rate is not None:
            rate = kept * old.rate + (1 - kept) * rate
        step = options.step if rate <= options.target_acceptance else -options.step
        if step < 0 and outcome.drafted >= self.count:
            step = 0.0
        moved = old.threshold + (1 - options.threshold_memory) * step
        self._states.put(request, _State(min(1.0, max(0.0, moved)), rate))
