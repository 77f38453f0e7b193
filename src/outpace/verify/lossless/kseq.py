"""K-SEQ: one acceptance test for all of k independent drafts.

Sun et al. 2023, "SpecTr: fast speculative decoding via optimal transport" (arXiv 2310.15141).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from outpace.core.logits.pieces import pieces
from outpace.core.proposal import DraftSampling, Proposal, Sampled
from outpace.verify.base import Rule
from outpace.verify.lossless.match import MatchRule
from outpace.verify.probs import (
    normalize,
    p_of_drafted,
    q_of_drafted,
    ratio,
    select_node,
)
from outpace.verify.siblings import (
    children,
    children_probs_at,
    in_turn,
    is_deterministic,
    merged,
    quotient,
    reach_merged,
)

ROUNDING = 1e-14
"""Relative differences of rho that are taken for none. The distribution is off by no more than
that."""


class KSeqRule(Rule):
    """At each node accept the first of its k children that passes p / (rho q).

        beta(rho) = sum min(q, p / rho)
        rho = root in [1, k] of 1 - (1 - beta)^k = rho beta
        a_i = min(1, p(x_i) / (rho q(x_i)))
        stop_n = (product over the path of the step to each node) (1 - a_1) ... (1 - a_k)
        next   = norm([p - min(q, p / rho) (1 - (1 - beta)^k) / beta]_+)

    Exact for independent drafts, and for deterministic tokens (where it is the match rule). Accepts
    at least 1 - 1/e of what any rule for k independent drafts could. Takes trees and, as trees with
    one fork, k chains: drafts with the same tokens so far are pooled, so that all chains that share
    an accepted prefix go on together. Children of a node must all be drawn from the same
    distribution, independently.
    """

    name: ClassVar[str] = "kseq"
    lossless: ClassVar[bool] = True
    takes: ClassVar[frozenset[DraftSampling]] = frozenset(
        {DraftSampling.DETERMINISTIC, DraftSampling.IID}
    )
    trees: ClassVar[bool] = True

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        if is_deterministic(proposal):
            return MatchRule().stop(p, proposal)
        pooled, stands, rho = self.shared(p, proposal)
        drafted = q_of_drafted(pooled, torch.float64) * rho.gather(1, pooled.tree.parents)
        step, stay = in_turn(ratio(p_of_drafted(p, pooled), drafted), pooled)
        return reach_merged(step, pooled.tree, stands) * stay

    def compute_shared(self, p: Tensor, proposal: Proposal) -> tuple[Proposal, Tensor, Tensor]:
        pooled, stands = merged(proposal)
        return pooled, stands, density(p, pooled)

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        if is_deterministic(proposal):
            return MatchRule().next(p, proposal, node)
        pooled, _, rho = self.shared(p, proposal)
        here, q = select_node(p, node).double(), children_probs_at(pooled, node)
        count, rho = (x.gather(1, node[:, None])[:, 0] for x in (children(pooled), rho))
        passing = torch.minimum(q, here / rho[..., None])
        beta = passing.sum(-1)
        times = quotient(_any(beta, count), beta)
        return normalize(here - passing * times[..., None], fallback=here)


def density(p: Tensor, proposal: Proposal) -> Tensor:
    """Returns ``[B, M]`` float64: rho of each node, 1 where there are not several children."""
    assert isinstance(proposal.distribution, Sampled)
    rho = torch.ones_like(p[..., 0], dtype=torch.float64)
    if proposal.tree.max_siblings < 2:
        return rho
    fork = proposal.tree.forks[0]
    count = children(proposal)[fork.row, fork.node].clamp(min=1)  # [F], padding has none
    eldest = proposal.tree.child[0][fork.row, fork.node]
    found = []
    for part in pieces(len(fork.row), p.shape[-1], p.device):
        row = fork.row[part]
        here = p[row, fork.node[part]].double()
        q = proposal.distribution.q[row, eldest[part]].double()
        found.append(_root(here, q, count[part].tolist()))
    rho[fork.row, fork.node] = torch.cat(found)
    return rho


def _root(p: Tensor, q: Tensor, counts: Sequence[int]) -> Tensor:
    """Returns ``[F]``: rho of nodes with distributions p and q ``[F, V]`` and n children.

    beta(rho) is full + capped / rho, if full is the mass of q at the tokens with rho q < p, and
    capped the mass of p at all others. As long as these two sets of tokens stay what they are, rho
    is the root of an equation in numbers. Its solution is never too large, because the true beta is
    never above that of any two sets; so rho only rises, and is found once it does not rise any
    more. That takes some five steps.
    """
    rho, probs = torch.ones_like(p[:, 0]), torch.stack([q, p], 1)  # [F, 2, V]
    drafted = q.sum(-1)
    while True:
        capped = (q * rho[:, None] >= p).to(p.dtype)
        of_q, of_p = (probs @ capped[..., None])[..., 0].unbind(1)
        full = (drafted - of_q).clamp(min=0).tolist()
        solved = [_solved(*each) for each in zip(full, of_p.tolist(), counts, strict=True)]
        risen = torch.tensor(solved, dtype=p.dtype, device=p.device)
        if not bool((risen > rho * (1 + ROUNDING)).any()):
            return torch.maximum(rho, risen)
        rho = torch.maximum(rho, risen)


def _solved(full: float, capped: float, count: int) -> float:
    """Returns the root in [1, count] of 1 - (1 - beta)^count = rho beta, where beta is full +
    capped / rho, by Newton's method between bounds."""
    low, high, rho = 1.0, float(count), 1.0
    while True:
        beta = min(1.0, full + capped / rho)
        gap = (1 - (1 - beta) ** count) - (rho * full + capped)  # falls where rho rises
        low, high = (rho, high) if gap > 0 else (low, rho)
        slope = -count * (1 - beta) ** (count - 1) * capped / rho**2 - full
        step = rho - gap / slope if slope else low
        ahead = step if low < step < high else (low + high) / 2
        if abs(ahead - rho) <= ROUNDING * rho / 4:
            return max(rho, ahead)
        rho = ahead


def _any(beta: Tensor, count: Tensor) -> Tensor:
    """1 - (1 - beta)^count, accurate for small beta."""
    return -torch.expm1(count * torch.log1p(-beta.clamp(max=1)))
