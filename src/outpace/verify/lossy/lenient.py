"""Lenience: accept more than the ratio allows, by a fixed factor.

Leviathan, Kalman and Matias 2022, appendix A.5 (arXiv 2211.17192).
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
class LenientRule(Rule):
    """The token rule with q scaled down by ``lenience``.

        a_i = min(1, p_i(x_i) / (lenience q_i(x_i)))
        next = norm([p - q]_+) after a failure, p after the last token

    Lossy unless lenience is 1; no token becomes more probable than p / lenience. Greedy decoding
    stays exact, since p is then 0 or 1.
    """

    lenience: float = option(0.8, "What q is multiplied by; 1 is lossless.")

    name: ClassVar[str] = "lenient"
    lossless: ClassVar[bool] = False
    takes: ClassVar[frozenset[Drawn]] = ONE_DISTRIBUTION
    trees: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(self.name, "lenience", self.lenience, 0, 1, above=True)

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        allowed = self.lenience * drafted_mass(proposal, torch.float64)
        return first_failure(ratio(at_drafted(p, proposal), allowed), proposal)

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        return residual_next(p, proposal, node)
