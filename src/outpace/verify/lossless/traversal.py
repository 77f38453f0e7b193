"""Traversal verification: from the leaves to the root.

Weng et al. 2025, "Traversal verification for speculative tree decoding" (arXiv 2505.12398).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from outpace.core.proposal import ONE_DISTRIBUTION, DraftSampling, Proposal, Sampled
from outpace.verify.base import Rule
from outpace.verify.lossless.block import BlockRule
from outpace.verify.lossless.match import MatchRule
from outpace.verify.probs import normalize, p_of_drafted, q_of_drafted, select_node
from outpace.verify.siblings import (
    TINY,
    children_probs_at,
    drawable,
    excess,
    is_deterministic,
    left_over,
    quotient,
    removed,
)


class TraversalRule(Rule):
    """Try the first leaf's whole path; when it fails, cut it off and subtract it from its parent.

        a(root) = 1,  a(child) = min(1, a(u) P_u(x) / Q_u(x))      from the top
        the first leaf v in depth-first order is accepted with probability a(v); else v goes, and
        R = [a(u) P_u - Q_u]_+,  P_u <- norm(R),  a(u) <- sum R / (sum R + 1 - a(u))      u = parent
        (without replacement Q_u also loses the token of v and is renormalised)
        stop_v = a(v) (product over the nodes tried before v of 1 - a)
        next   = P_v as it is by then

    Exact for siblings drawn with or without replacement and for deterministic tokens (where it is
    the match rule). Block verification on a chain; never accepts fewer tokens on average than the
    recursive rule. As implemented, P_u is norm([p - t q]_+), and cutting off a child adds (sum [p -
    t q]_+) / (a(u) Q) to t, where Q is the mass of q that was not yet removed.
    """

    name: ClassVar[str] = "traversal"
    lossless: ClassVar[bool] = True
    takes: ClassVar[frozenset[DraftSampling]] = ONE_DISTRIBUTION
    trees: ClassVar[bool] = True
    looks_ahead: ClassVar[bool] = True

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        if is_deterministic(proposal):
            return MatchRule().stop(p, proposal)
        if proposal.tree.is_chain:
            return BlockRule().stop(p, proposal)
        stop: Tensor = self.shared(p, proposal)[0]
        return stop

    def compute_shared(self, p: Tensor, proposal: Proposal) -> tuple[Tensor, Tensor]:
        return _traverse(p, proposal)

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        if is_deterministic(proposal):
            return MatchRule().next(p, proposal, node)
        if proposal.tree.is_chain:
            return BlockRule().next(p, proposal, node)
        here = select_node(p, node).double()
        t = self.shared(p, proposal)[1].gather(1, node[:, None])[:, 0]
        return normalize(excess(here, children_probs_at(proposal, node), t), fallback=here)


def _traverse(p: Tensor, proposal: Proposal) -> tuple[Tensor, Tensor]:
    """Returns stop and t, both ``[B, M]``.

    Cutting off a child changes its parent only, whatever became of the child's own children. So all
    nodes are settled level by level from the top, those of one depth and sibling rank at once, and
    the depth-first order matters only at the end, for the product of the failures.
    """
    tree, there = proposal.tree, drawable(proposal, q_of_drafted(proposal, torch.float64))
    accept, t = _settled(p, proposal, there)
    root = torch.ones_like(there[:, :1])
    accept = torch.where(torch.cat([root, there & proposal.valid], 1), accept, 0.0)
    order = tree.leaves_first  # [B, M], the root is the last
    tried = accept.gather(1, order)
    alive = torch.cat([torch.ones_like(tried[:, :1]), (1 - tried).cumprod(1)[:, :-1]], 1)
    return torch.zeros_like(tried).scatter(1, order, alive * tried), t


def _settled(p: Tensor, proposal: Proposal, there: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a and t ``[B, M]`` of each node once all of its children are cut off."""
    assert isinstance(proposal.distribution, Sampled)
    tree = proposal.tree
    drafted = q_of_drafted(proposal, torch.float64)
    # Of each child: what p gives it, what q gives it, and whether it can be cut off.
    children = torch.stack([p_of_drafted(p, proposal) * there, drafted, there & proposal.valid])
    start = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64, device=p.device)
    # Of each node: a, t, sum [p - t q]_+ and the mass of q that was not yet removed.
    state = start[:, None, None].repeat(1, *p.shape[:2])  # [4, B, M]
    for group in tree.sibling_groups:
        row, parent, child = group.row, group.parent, group.child
        at, q, cuttable = children[:, row, child]
        a, t, total, left = before = state[:, row, parent]
        over = (at - t * q).clamp(min=0) * left * a
        state[0, row, child + 1] = quotient(over, total * q).clamp(max=1)
        times = t + quotient(total, a * left)
        gone = None
        if group.has_younger and not proposal.distribution.with_replacement:
            gone = removed(proposal, there, row, child)
        rest, kept = left_over(p, proposal, torch.stack([row, parent, child]), times, gone)
        share = quotient(a * rest, total)  # sum [a P - Q]_+
        # A node that cannot be rejected any more stays so, as does the root.
        passing = torch.where(a >= 1, 1.0, quotient(share, share + (1 - a)))
        after = torch.stack([passing, times, rest, left if kept is None else kept])
        cut = (cuttable > 0) & (a > TINY)
        state[:, row, parent] = torch.where(cut, after, before)
    return state[0], state[1]
