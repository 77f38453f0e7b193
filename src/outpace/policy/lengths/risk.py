"""A chain ends once something in it has probably been rejected.

Huang et al. 2024, "SpecDec++" (arXiv 2405.19715), where a trained head predicts acceptance. Here it
is learned from the rounds that are played: how often tokens of a given confidence are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Le
from torch import Tensor

from outpace.core.options import Options
from outpace.core.proposal import EndsAfter
from outpace.core.request import PerRequest, Request
from outpace.draft.base import Drafter
from outpace.errors import ConfigError
from outpace.policy.base import Outcome
from outpace.policy.calibration import Calibration, Confidences
from outpace.policy.lengths.base import StoppingPolicy


@dataclass(frozen=True, kw_only=True)
class RiskOptions(Options):
    """What a user may set."""

    threshold: Annotated[float, Ge(0), Le(1)] = 0.7
    """The chance of any rejection so far above which nothing more is drafted."""


class Risk(StoppingPolicy):
    """Ends a chain once the chance that any of its tokens is rejected is above ``threshold``.

    A token's chance of acceptance is that of earlier tokens of like confidence, the probability in
    the drafter's distribution. The token that passes the threshold stays in the draft. All requests
    learn together, except sampled ones with a seed of their own.
    """

    name: ClassVar[str] = "risk"
    usual: ClassVar[int] = 20
    Options: ClassVar[type[Any]] = RiskOptions

    def __init__(self, count: int, options: Any) -> None:
        super().__init__(count, options)
        first = Calibration()
        self._known = PerRequest(lambda request: first, lasting=True, common=first)
        self._confidences = Confidences(())

    def meet(self, drafter: Drafter) -> None:
        if drafter.joins_drafts:
            raise ConfigError(
                f"length='risk' learns from whole chains of one drafter, and method="
                f"{drafter.name!r} has several draft for a row at once: choose another length."
            )

    def calibration(self, request: Request) -> Calibration:
        """Returns what is known for a request."""
        return self._known[request]

    def ending(self, requests: Sequence[Request]) -> Callable[[Sequence[int]], EndsAfter]:
        self._confidences = of_round = Confidences(requests)
        chances = [self.calibration(request).chances() for request in requests]

        def risky(safe: Tensor) -> Tensor:
            return torch.gt(1 - safe, self.options.threshold)

        return lambda counts: of_round.watch(counts, chances, risky)

    def learn(self, request: Request, outcome: Outcome) -> None:
        ranges = self._confidences.ranges(request, outcome.depth)
        if ranges is not None:
            known = self.calibration(request).with_draft(ranges, outcome.accepted)
            self._known[request] = known
