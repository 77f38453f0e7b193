"""Reflective verification: look at the draft twice.

Wang et al. 2025, "Think before you accept: semantic reflective verification for faster speculative
decoding" (arXiv 2505.18629).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outpace.core.proposal import Drawn, Proposal
from outpace.errors import ConfigError
from outpace.verify.base import Rule, normalised
from outpace.verify.evidence import RuleNeeds
from outpace.verify.lossless.token import TokenRule
from outpace.verify.options import require


@dataclass(frozen=True)
class ReflectiveRule(Rule):
    """The token rule against a law that also knows what the target thinks after reading the draft.

        fused = norm(p^(1 - weight) p_2^weight), that is, (1 - weight) l_1 + weight l_2 in logits
        stop, next = those of the token rule with fused for p

    p_2 is the target's law at the same tokens in a second copy of the draft, after ``prompt``.
    Samples exactly from the fused law, which is p only for weight 0: lossy. In greedy rows the
    fused law is made from the laws before the argmax, if the engine brings them, and its argmax is
    taken.
    """

    weight: float = 0.3
    prompt: str = "\nRead the text again and give the same continuation, corrected if needed:\n"

    name: ClassVar[str] = "reflective"
    lossless: ClassVar[bool] = False
    takes: ClassVar[frozenset[Drawn]] = frozenset(Drawn)
    trees: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(self.name, "weight", self.weight, 0, 1, above=False)

    @property
    def needs(self) -> RuleNeeds:
        return RuleNeeds(second_pass=self.prompt, soft=True)

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        return TokenRule().stop(self.fused(p), proposal)

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        return TokenRule().next(self.fused(p), proposal, node)

    def fused(self, p: Tensor) -> Tensor:
        """Returns ``[B, M, V]``: the law that is sampled from."""
        second, soft = self.evidence.second, self.evidence.soft
        if second is None:
            raise ConfigError("verify='reflective' needs evidence.second in every round.")
        if soft is None:
            return _between(p, second, self.weight)
        law = _between(soft, second, self.weight)
        best = torch.zeros_like(law).scatter(-1, law.argmax(-1, keepdim=True), 1.0)
        return torch.where(p.amax(-1, keepdim=True) == 1, best, law)


def _between(first: Tensor, second: Tensor, weight: float) -> Tensor:
    """norm(first^(1 - weight) second^weight), the first where they have no token in common."""
    if weight == 0:
        return first
    return normalised(first ** (1 - weight) * second.to(first) ** weight, fallback=first)
