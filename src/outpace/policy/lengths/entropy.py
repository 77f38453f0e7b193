"""A chain ends before a token of which the drafter knows too little.

Agrawal et al. 2024, "AdaEDL: early draft stopping by an entropy-based lower bound on token
acceptance probability" (arXiv 2410.18351).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Le
from torch import Tensor

from outpace.core.options import Options
from outpace.core.proposal import DraftingTerms
from outpace.core.request import Request
from outpace.policy.lengths.base import LengthPolicy


@dataclass(frozen=True, kw_only=True)
class EntropyOptions(Options):
    """What a user may set."""

    threshold: Annotated[float, Ge(0), Le(100)] = 2.0
    """The entropy of the drafter's next distribution, in nats, above which nothing more is
    drafted."""


class Entropy(LengthPolicy):
    """Ends a chain before drawing from a distribution with an entropy above ``threshold``.

    Since the distribution alone decides, before anything is drawn from it, all tokens that were
    drawn follow their distributions.
    """

    name: ClassVar[str] = "entropy"
    stops: ClassVar[bool] = True
    usual: ClassVar[int] = 20
    Options: ClassVar[type[Any]] = EntropyOptions

    def budgets(self, requests: Sequence[Request]) -> list[int]:
        return [self.count] * len(requests)

    def terms(self, requests: Sequence[Request], terms: DraftingTerms) -> DraftingTerms:
        of_rule = terms.keeps_drafting

        def keeps_drafting(distribution: Tensor) -> Tensor:
            on = torch.le(torch.special.entr(distribution).sum(-1), self.options.threshold)
            return on if of_rule is None else on.logical_and(of_rule(distribution))

        return replace(terms, keeps_drafting=keeps_drafting)
