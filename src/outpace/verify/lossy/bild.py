"""BiLD: let the small model run, and roll back where the large one disagrees strongly.

Kim et al. 2023, "Speculative decoding with big little decoder" (arXiv 2302.07863).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outpace.core.options import option
from outpace.core.proposal import ONE_DISTRIBUTION, Drawn, Proposal
from outpace.verify.base import Rule, at_drafted, first_failure, target_probs
from outpace.verify.evidence import RuleNeeds
from outpace.verify.options import require


@dataclass(frozen=True)
class BildRule(Rule):
    """Stop before the first token that the target finds too surprising and would not choose itself.

        x passes if -log p(x) <= rollback or x = argmax p
        next = p (which is the argmax in greedy rows)

    Lossy, and greedy in the paper: p is the distribution before the argmax. The engine hands it
    over for greedy rows, too; without it they are decoded exactly. rollback 0 is plain greedy
    decoding. The other half of BiLD happens while drafting: a chain ends before a token whose
    distribution has max q < ``fallback`` (q before the argmax, too). A drafter without q, such as
    look-up, never stops.
    """

    rollback: float = option(
        5.0, "A token passes if -log p of it is at most this; 0 is plain greedy decoding."
    )
    fallback: float = option(
        0.6, "A draft ends before a token whose distribution has max q below this."
    )

    name: ClassVar[str] = "bild"
    lossless: ClassVar[bool] = False
    takes: ClassVar[frozenset[Drawn]] = ONE_DISTRIBUTION
    trees: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(self.name, "rollback", self.rollback, 0, float("inf"), above=False)
        require(self.name, "fallback", self.fallback, 0, 1, above=False)

    @property
    def needs(self) -> RuleNeeds:
        return RuleNeeds(soft=True, keeps_drafting=self.keeps_drafting)

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        distribution = p if self.evidence.soft is None else self.evidence.soft
        best = p.argmax(-1)[:, :-1] == proposal.tokens  # [B, N]
        passes = (-at_drafted(distribution, proposal).log() <= self.rollback) | best
        return first_failure(passes.double(), proposal)

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        return target_probs(p, node)

    def keeps_drafting(self, q: Tensor) -> Tensor:
        """Returns ``[B]`` bool: whether the drafter is sure enough of its next distribution q [B,
        V]."""
        return torch.ge(q.amax(-1), self.fallback)
