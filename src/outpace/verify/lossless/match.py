"""Sample from the target; go on while what was sampled had been drafted.

"Naive" multi-candidate sampling, and what Hugging Face's prompt look-up and vLLM's one-hot drafts
do.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from outpace.core.proposal import DraftSampling, Proposal
from outpace.verify.base import Rule
from outpace.verify.probs import normalize, p_of_drafted, select_node
from outpace.verify.siblings import reach_probs, repeats


class MatchRule(Rule):
    """The walk at a node draws y from p and goes to the child that is y, or stops with y.

        stop_n = (product of p over the path to n) (1 - p(children of n))
        next   = p without the children, renormalised

    Exact for any proposal however drawn, chain or tree, since every emitted token is a draw from
    the target. It accepts p(x) where the token rule accepts min(1, p / q), which is never less.
    """

    name: ClassVar[str] = "match"
    lossless: ClassVar[bool] = True
    takes: ClassVar[frozenset[DraftSampling]] = frozenset(DraftSampling)
    trees: ClassVar[bool] = True

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        tree = proposal.tree
        mass = p_of_drafted(p, proposal) * (proposal.valid & ~repeats(proposal))
        leave = (tree.child_of * mass[:, None, :]).sum(-1)
        return reach_probs(mass, tree) * (1 - leave).clamp(min=0)

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        here = select_node(p, node)
        if proposal.tokens.shape[1] == 0:
            return here
        drafted = (proposal.tree.parents == node[:, None]) & proposal.valid
        taken = torch.zeros_like(here).scatter_reduce(
            1, proposal.tokens, drafted.to(here.dtype), "amax"
        )
        return normalize(here * (1 - taken), fallback=here)
