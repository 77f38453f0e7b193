"""Recursive rejection sampling over siblings.

SpecInfer's multi-step speculative sampling (Miao et al. 2023, arXiv 2305.09781); with and without
replacement: Yang et al. 2024 (arXiv 2401.06706), Jeon et al. 2024 (arXiv 2402.14160).
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
    children_law_at,
    drawable,
    excess,
    in_turn,
    possible_child,
    quotient,
    reach,
)


class RecursiveRule(Rule):
    """At each node try the children in turn, each against what its elder siblings left of p.

        r_0 = p,  s_0 = q
        a_i = min(1, r_{i-1}(x_i) / s_{i-1}(x_i)),  r_i = norm([r_{i-1} - s_{i-1}]_+)
        s_i = q with replacement; q without x_1 ... x_i, renormalised, without
        stop_n = (product over the path of the step to each node) (1 - a_1) ... (1 - a_k)
        next   = r_k

    Exact for siblings drawn with or without replacement, in the order of their nodes, and for
    points (where it is the match rule). On a chain it is the token rule. As implemented, r_i is
    norm([p - t_i q]_+) with t_0 = 0 and t_{i+1} = t_i + sum [p - t_i q]_+ / (q not yet removed).
    A child that q cannot produce any more (q was exhausted) is passed over.
    """

    name: ClassVar[str] = "recursive"
    lossless: ClassVar[bool] = True
    takes: ClassVar[frozenset[Drawn]] = frozenset(Drawn)
    trees: ClassVar[bool] = True

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        if as_match(proposal):
            return MatchRule().stop(p, proposal)
        accept, _ = self.weighed(p, proposal)
        step, stay = in_turn(accept, proposal)
        return reach(step, proposal.tree) * stay

    def weigh(self, p: Tensor, proposal: Proposal) -> tuple[Tensor, Tensor]:
        return _in_order(p, proposal)

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        if as_match(proposal):
            return MatchRule().next(p, proposal, node)
        _, times = self.weighed(p, proposal)
        t = times.gather(1, node[:, None])[:, 0]
        here = rows_of(p, node).double()
        return normalised(excess(here, children_law_at(proposal, node), t), fallback=here)


def _in_order(p: Tensor, proposal: Proposal) -> tuple[Tensor, Tensor]:
    """Returns a ``[B, N]`` of each child, and t ``[B, M]`` of each node after all its children."""
    tree = proposal.tree
    at_child, drafted = at_drafted(p, proposal), drafted_mass(proposal, torch.float64)  # [B, N]
    t = torch.zeros_like(p[..., 0], dtype=torch.float64)  # [B, M]
    total, left = torch.ones_like(t), torch.ones_like(t)  # sum [p - t q]_+, q not yet removed
    accept = torch.zeros_like(at_child)
    there = drawable(proposal, drafted)
    open_ = _Open(p, proposal) if tree.width > 1 else None
    for rank in range(tree.width):
        over = (at_child - t.gather(1, tree.parents) * drafted).clamp(min=0)
        fresh = ratio(over * quotient(left, total).gather(1, tree.parents), drafted)
        accept = torch.where((tree.sibling_rank == rank) & there, fresh, accept)
        index = possible_child(proposal, rank, there)  # [B, M]
        t = torch.where(index >= 0, t + quotient(total, left), t)
        if open_ is not None and rank + 1 < tree.width:
            open_.subtract(rank, index, t, total, left)
    return accept, t


class _Open:
    """The laws at those nodes that still have children to come: all that is read of the
    vocabulary."""

    def __init__(self, p: Tensor, proposal: Proposal) -> None:
        assert isinstance(proposal.law, Sampled)
        self._proposal, self._with_replacement = proposal, proposal.law.with_replacement
        fork = proposal.tree.forks[0]
        eldest = proposal.tree.child[0][fork.row, fork.node]
        self._p = p[fork.row, fork.node].double()  # [F, V]
        self._q = proposal.law.q[fork.row, eldest].double()
        self._left = self._q if self._with_replacement else self._q.clone()

    def subtract(self, rank: int, index: Tensor, t: Tensor, total: Tensor, left: Tensor) -> None:
        """Sets ``total`` and ``left`` [B, M] of the nodes that have a child after this rank.

        index: ``[B, M]``, each node's child of this rank, -1 for none; t: ``[B, M]``.
        """
        fork = self._proposal.tree.forks[rank]
        if rank:
            self._p, self._q, self._left = (x[fork.among] for x in (self._p, self._q, self._left))
        at = (fork.row, fork.node)
        total[at] = excess(self._p, self._q, t[at]).sum(-1)
        if not self._with_replacement:
            gone = index[at]
            token = self._proposal.tokens[fork.row, gone.clamp(min=0)][:, None]
            kept = self._left.gather(1, token) * (gone < 0)[:, None]
            left[at] = self._left.scatter_(1, token, kept).sum(-1)
