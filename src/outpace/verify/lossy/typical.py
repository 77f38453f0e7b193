"""Typical acceptance: keep what the target finds plausible.

Cai et al. 2024, "Medusa: simple LLM inference acceleration framework with multiple decoding heads"
(arXiv 2401.10774).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outpace.core.options import option
from outpace.core.proposal import Drawn, Proposal
from outpace.core.trees.tree import Tree
from outpace.verify.base import Rule, at_drafted, in_pieces, reached, stop_at, target_probs
from outpace.verify.options import require


@dataclass(frozen=True)
class TypicalRule(Rule):
    """Accept a token whose probability is above a threshold that falls with the target's entropy.

        x passes if p(x) > min(posterior_threshold, posterior_alpha exp(-entropy of p))
        stop at the deepest node whose whole path passes, of several at the likeliest
        next = p

    Lossy; q plays no part. Greedy decoding stays exact. The defaults .09 and .3 are those of
    Medusa's paper and of vLLM. A function in Medusa's code has them swapped, which accepts more
    tokens and deviates more.
    """

    posterior_threshold: float = option(0.09, "p of a token above this is enough.")
    posterior_alpha: float = option(
        0.3, "Above this times exp(-entropy of p), too: less where the target is uncertain."
    )

    name: ClassVar[str] = "typical"
    lossless: ClassVar[bool] = False
    takes: ClassVar[frozenset[Drawn]] = frozenset(Drawn)
    trees: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("posterior_threshold", "posterior_alpha"):
            require(self.name, name, getattr(self, name), 0, 1, above=False)

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        tree = proposal.tree
        entropy = in_pieces(lambda probs: torch.special.entr(probs).sum(-1), p).double()  # [B, M]
        level = (self.posterior_alpha * (-entropy).exp()).clamp(max=self.posterior_threshold)
        at = at_drafted(p, proposal)
        passes = (at > level.gather(1, tree.parents)) & proposal.valid
        return stop_at(_likeliest(passes, at, tree), p.shape[1], torch.float64)

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        return target_probs(p, node)


def _likeliest(passes: Tensor, at: Tensor, tree: Tree) -> Tensor:
    """Returns ``[B]``: the deepest node whose whole path passes, of equally deep ones the
    likeliest.

    passes, at: ``[B, N]``, of each node: whether it passes, and its probability.
    """
    depth = torch.where(reached(passes, tree), tree.depth, -1)  # [B, M]
    longest = depth == depth.amax(1, keepdim=True)
    step = torch.nn.functional.pad(at, (1, 0), value=1.0).log()
    likely = torch.where(tree.ancestors, step[:, None, :], 0.0).sum(-1)
    return torch.where(longest, likely, float("-inf")).argmax(1)
