"""Reflective verification: look at the draft twice.

Wang et al. 2025, "Think before you accept: semantic reflective verification for faster speculative
decoding" (arXiv 2505.18629).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outpace.core.options import option
from outpace.core.proposal import ONE_DISTRIBUTION, Drawn, Proposal
from outpace.core.values import shown
from outpace.errors import ConfigError
from outpace.verify.base import Rule, in_pieces, normalised, of_token, rows_of
from outpace.verify.evidence import RuleNeeds
from outpace.verify.lossless.token import residual, stop_where_one_fails
from outpace.verify.options import require


@dataclass(frozen=True)
class ReflectiveRule(Rule):
    """The token rule against a distribution that also uses what the target says after it has read
    the draft.

        fused = norm(p^(1 - weight) p_2^weight), that is, (1 - weight) l_1 + weight l_2 in logits
        stop, next = those of the token rule with fused for p

    p_2 is the target's distribution at the same tokens in a second copy of the draft, after
    ``prompt``. Samples exactly from the fused distribution, which is p only for weight 0: lossy. In
    greedy rows the fused distribution is made from the distributions before the argmax, if the
    engine brings them, and its argmax is taken.
    """

    weight: float = option(0.3, "Of what the target says after reading the draft; 0 is lossless.")
    prompt: str = option(
        "\nRead the text again and give the same continuation, corrected if needed:\n",
        "Stands between the draft and its second copy.",
    )

    name: ClassVar[str] = "reflective"
    lossless: ClassVar[bool] = False
    takes: ClassVar[frozenset[Drawn]] = ONE_DISTRIBUTION
    trees: ClassVar[bool] = False
    looks_ahead: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(self.name, "weight", self.weight, 0, 1, above=False)
        if not isinstance(self.prompt, str) or not self.prompt:
            raise ConfigError(
                f"verify='reflective': prompt must be a text that is not empty, not "
                f"{shown(self.prompt)}."
            )

    @property
    def needs(self) -> RuleNeeds:
        return RuleNeeds(second_pass=self.prompt, soft=True)

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        def at(p: Tensor, second: Tensor, soft: Tensor, tokens: Tensor) -> Tensor:
            return of_token(self.fused(p, second, soft), tokens)

        before = [probs[:, :-1] for probs in (p, *self._seen(p))]  # the rule takes chains
        return stop_where_one_fails(in_pieces(at, *before, proposal.tokens).double(), proposal)

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        here = [rows_of(probs, node) for probs in (p, *self._seen(p))]
        return residual(self.fused(*here), proposal, node)

    def _seen(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """The distributions at the second copy, and those at the first before any argmax, if they
        are there."""
        second, soft = self.evidence.second, self.evidence.soft
        if second is None:
            raise ConfigError("verify='reflective' needs evidence.second in every round.")
        return second, p if soft is None else soft

    def fused(self, p: Tensor, second: Tensor, soft: Tensor) -> Tensor:
        """Returns the distribution that is sampled from.

        p, second, soft: ``[..., V]``, the target's distributions at the first and at the second
        copy, and at the first before any argmax.
        """
        distribution = _between(soft, second, self.weight)
        best = torch.zeros_like(distribution).scatter(
            -1, distribution.argmax(-1, keepdim=True), 1.0
        )
        return torch.where(p.amax(-1, keepdim=True) == 1, best, distribution)


def _between(first: Tensor, second: Tensor, weight: float) -> Tensor:
    """norm(first^(1 - weight) second^weight), the first where they have no token in common."""
    if weight == 0:
        return first
    return normalised(first ** (1 - weight) * second.to(first) ** weight, fallback=first)
