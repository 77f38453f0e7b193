"""K-SEQ: one acceptance test for all of k independent drafts.

Sun et al. 2023, "SpecTr: fast speculative decoding via optimal transport" (arXiv 2310.15141).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from outpace.core.proposal import Drawn, Proposal, Sampled
from outpace.verify.base import Rule, drafted_mass, normalised, ratio, rows_of
from outpace.verify.lossless.match import MatchRule
from outpace.verify.siblings import (
    as_match,
    at_drafted,
    children,
    children_law_at,
    in_turn,
    merged,
    quotient,
    reach_merged,
)


class KSeqRule(Rule):
    """At each node accept the first of its k children that passes p / (rho q).

        beta(rho) = sum min(q, p / rho)
        rho = root in [1, k] of 1 - (1 - beta)^k = rho beta
        a_i = min(1, p(x_i) / (rho q(x_i)))
        stop_n = (product over the path of the step to each node) (1 - a_1) ... (1 - a_k)
        next   = norm([p - min(q, p / rho) (1 - (1 - beta)^k) / beta]_+)

    Exact for independent drafts, and for points (where it is the match rule). Accepts at least 1 -
    1/e of what any rule for k independent drafts could. Takes trees and, as trees with one fork, k
    chains: drafts with the same tokens so far are pooled, so that all chains that share an accepted
    prefix go on together. Children of a node must all be drawn from the same law, independently.
    """

    name: ClassVar[str] = "kseq"
    lossless: ClassVar[bool] = True
    takes: ClassVar[frozenset[Drawn]] = frozenset({Drawn.POINT, Drawn.IID})
    trees: ClassVar[bool] = True

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        if as_match(proposal):
            return MatchRule().stop(p, proposal)
        pooled, stands, rho = self.weighed(p, proposal)
        drafted = drafted_mass(pooled, torch.float64) * rho.gather(1, pooled.tree.parents)
        step, stay = in_turn(ratio(at_drafted(p, pooled), drafted), pooled)
        return reach_merged(step, pooled.tree, stands) * stay

    def weigh(self, p: Tensor, proposal: Proposal) -> tuple[Proposal, Tensor, Tensor]:
        pooled, stands = merged(proposal)
        return pooled, stands, density(p, pooled)

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        if as_match(proposal):
            return MatchRule().next(p, proposal, node)
        pooled, _, rho = self.weighed(p, proposal)
        here, q = rows_of(p, node).double(), children_law_at(pooled, node)
        count, rho = (x.gather(1, node[:, None])[:, 0] for x in (children(pooled), rho))
        passing = torch.minimum(q, here / rho[..., None])
        beta = passing.sum(-1)
        times = quotient(_any(beta, count), beta)
        return normalised(here - passing * times[..., None], fallback=here)


def density(p: Tensor, proposal: Proposal, steps: int = 40) -> Tensor:
    """Returns ``[B, M]``: rho of each node, never below the root, for which the rule is exact."""
    assert isinstance(proposal.law, Sampled)
    rho = torch.ones_like(p[..., 0], dtype=torch.float64)
    if proposal.tree.width < 2:
        return rho
    fork = proposal.tree.forks[0]
    count = children(proposal)[fork.row, fork.node]  # [F]
    here = p[fork.row, fork.node].double()  # [F, V]
    q = proposal.law.q[fork.row, proposal.tree.child[0][fork.row, fork.node]].double()
    low, high = torch.ones_like(here[..., 0]), count.clamp(min=1).to(here.dtype)
    for _ in range(steps):
        middle = (low + high) / 2
        beta = torch.minimum(q, here / middle[..., None]).sum(-1)
        below = _any(beta, count) > middle * beta
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    rho[fork.row, fork.node] = high
    return rho


def _any(beta: Tensor, count: Tensor) -> Tensor:
    """1 - (1 - beta)^count, accurate for small beta."""
    return -torch.expm1(count * torch.log1p(-beta.clamp(max=1)))
