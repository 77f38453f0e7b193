"""K-SEQ: one acceptance test for all of k independent drafts.

Sun et al. 2023, "SpecTr: fast speculative decoding via optimal transport" (arXiv 2310.15141).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from outpace.core.proposal import Drawn, Proposal
from outpace.verify.base import Rule, drafted_mass, normalised, ratio, rows_of
from outpace.verify.match import MatchRule
from outpace.verify.siblings import (
    as_match,
    at_drafted,
    children,
    children_law,
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
        pooled, stands = merged(proposal)
        rho = density(p.double(), children_law(pooled), children(pooled))
        drafted = drafted_mass(pooled, torch.float64) * rho.gather(1, pooled.tree.parents)
        step, stay = in_turn(ratio(at_drafted(p, pooled), drafted), pooled)
        return reach_merged(step, pooled.tree, stands) * stay

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        if as_match(proposal):
            return MatchRule().next(p, proposal, node)
        pooled, _ = merged(proposal)
        here, q = rows_of(p, node).double(), children_law_at(pooled, node)
        count = children(pooled).gather(1, node[:, None])[:, 0]
        rho = density(here, q, count)
        passing = torch.minimum(q, here / rho[..., None])
        beta = passing.sum(-1)
        times = quotient(_any(beta, count), beta)
        return normalised(here - passing * times[..., None], fallback=here)


def density(p: Tensor, q: Tensor, count: Tensor, steps: int = 40) -> Tensor:
    """Returns ``[...]``: rho of each node, never below the root, for which the rule is exact.

    p, q: ``[..., V]``; count: ``[...]``, how many drafts there are.
    """
    low, high = torch.ones_like(p[..., 0]), count.clamp(min=1).to(p.dtype)
    if not bool((count > 1).any()):
        return high
    for _ in range(steps):
        middle = (low + high) / 2
        beta = torch.minimum(q, p / middle[..., None]).sum(-1)
        below = _any(beta, count) > middle * beta
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return high


def _any(beta: Tensor, count: Tensor) -> Tensor:
    """1 - (1 - beta)^count, accurate for small beta."""
    return -torch.expm1(count * torch.log1p(-beta.clamp(max=1)))
