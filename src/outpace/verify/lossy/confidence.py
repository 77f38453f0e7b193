"""Confidence-modulated verification: a threshold that follows the drafter's confidence.

Sen, Dasgupta and Waghela 2025, "Confidence-modulated speculative decoding for large language
models" (CM-ASD, arXiv 2508.15371).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outpace.core.options import option
from outpace.core.proposal import ONE_DISTRIBUTION, Drawn, Proposal, Sampled
from outpace.errors import ConfigError
from outpace.verify.base import Rule, at_drafted, first_failure, in_pieces, target_probs
from outpace.verify.evidence import RuleNeeds
from outpace.verify.options import require


@dataclass(frozen=True)
class ConfidenceRule(Rule):
    """Accepts a token whose probability under the target is above a threshold, which is lower where
    the drafter is confident.

        C = mean of 1 - H(q) / log V, max q, and the margin between the two largest of q
        x passes if p(x) >= strict + (loose - strict) C
        next = p

    Lossy. Greedy decoding stays exact for strict > 0. The paper names the three signals and asks
    for a threshold that is monotone in them; that it is a linear function of their mean is our
    choice. A point without the drafter's distribution counts as sure (C = 1).
    """

    strict: float = option(0.3, "Least p of a token of which the drafter is not sure at all.")
    loose: float = option(0.05, "Least p of a token of which the drafter is entirely sure.")

    name: ClassVar[str] = "confidence"
    lossless: ClassVar[bool] = False
    takes: ClassVar[frozenset[Drawn]] = ONE_DISTRIBUTION
    trees: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(self.name, "strict", self.strict, 0, 1, above=True)
        require(self.name, "loose", self.loose, 0, 1, above=True)
        if self.loose > self.strict:
            raise ConfigError(
                f"verify='confidence': loose={self.loose} must not be above strict={self.strict}."
            )

    @property
    def needs(self) -> RuleNeeds:
        return RuleNeeds(draft_probs=True)

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        q = self.evidence.draft
        if q is None and isinstance(proposal.distribution, Sampled):
            q = proposal.distribution.q
        sure = 1.0 if q is None else in_pieces(confidence, q)  # [B, N]
        level = self.strict + (self.loose - self.strict) * sure
        return first_failure((at_drafted(p, proposal) >= level).double(), proposal)

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        return target_probs(p, node)


def confidence(q: Tensor) -> Tensor:
    """Returns ``[...]`` in [0, 1]: how sure distributions ``[..., V]`` are. 1 for a one-hot
    distribution."""
    size = q.shape[-1]
    if size < 2:
        return torch.ones_like(q[..., 0], dtype=torch.float64)
    order = 1 - torch.special.entr(q).sum(-1).double() / torch.tensor(float(size)).log().double()
    top = q.topk(2, -1).values.double()
    mean: Tensor = (order + top[..., 0] + top[..., 0] - top[..., 1]) / 3
    return mean.clamp(0, 1)
