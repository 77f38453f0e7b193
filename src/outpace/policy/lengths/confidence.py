"""A chain ends after a token that the drafter itself finds unlikely.

``assistant_confidence_threshold`` of transformers; Mamou et al. 2024, "Dynamic speculation
lookahead" (arXiv 2405.04304).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le

from outpace.core.options import Options
from outpace.core.proposal import EndsAfter
from outpace.core.request import Request
from outpace.draft.exits import probability
from outpace.policy.lengths.base import StoppingPolicy


@dataclass(frozen=True, kw_only=True)
class ConfidenceOptions(Options):
    """What a user may set."""

    threshold: Annotated[float, Ge(0), Le(1)] = 0.4
    """The probability below which a token is the last of its chain."""


class Confidence(StoppingPolicy):
    """Ends a chain after a token that has less than ``threshold`` in the drafter's distribution.

    The token stays in the draft: dropping it would be a choice made after it was drawn, and what is
    left would not follow the drafter's distribution any more.
    """

    name: ClassVar[str] = "confidence"
    usual: ClassVar[int] = 20
    Options: ClassVar[type[Any]] = ConfidenceOptions

    def ending(self, requests: Sequence[Request]) -> Callable[[Sequence[int]], EndsAfter]:
        threshold = self.options.threshold
        return lambda counts: (
            lambda distribution, token: probability(distribution, token) < threshold
        )
