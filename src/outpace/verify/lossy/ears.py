"""EARS: more tolerant where the target itself is uncertain.

Sun, Chen and Xu 2025, "Efficient adaptive rejection sampling for accelerating speculative decoding
in large language models" (arXiv 2512.13194).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outpace.core.options import option
from outpace.core.proposal import ONE_DISTRIBUTION, Drawn, Proposal
from outpace.verify.base import Rule, at_drafted, drafted_mass, first_failure, ratio
from outpace.verify.lossless.token import residual_next
from outpace.verify.options import require


@dataclass(frozen=True)
class EarsRule(Rule):
    """The token rule with an allowance for uncertainty added to the ratio.

        a_i = min(1, p_i(x_i) / q_i(x_i) + tolerance (1 - max p_i))
        next = norm([p - q]_+) after a failure, p after the last token

    Lossy unless tolerance is 0. Greedy decoding stays exact, since max p is then 1.
    """

    tolerance: float = option(
        0.1, "Added to the ratio p / q where the target is uncertain; 0 is lossless."
    )

    name: ClassVar[str] = "ears"
    lossless: ClassVar[bool] = False
    takes: ClassVar[frozenset[Drawn]] = ONE_DISTRIBUTION
    trees: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(self.name, "tolerance", self.tolerance, 0, 1, above=False)

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        accept = ratio(at_drafted(p, proposal), drafted_mass(proposal, torch.float64))
        doubt = 1 - p.amax(-1).double()[:, :-1]  # [B, N], the rule takes chains
        return first_failure((accept + self.tolerance * doubt).clamp(max=1), proposal)

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        return residual_next(p, proposal, node)
