"""Traversal verification: from the leaves to the root.

Weng et al. 2025, "Traversal verification for speculative tree decoding" (arXiv 2505.12398).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outpace.core.proposal import Drawn, Proposal, Sampled
from outpace.core.tree import Tree
from outpace.verify.base import Rule, drafted_mass, normalised, rows_of
from outpace.verify.lossless.block import BlockRule
from outpace.verify.lossless.match import MatchRule
from outpace.verify.siblings import (
    TINY,
    as_match,
    at_drafted,
    children_law_at,
    drawable,
    excess,
    quotient,
)


class TraversalRule(Rule):
    """Try the first leaf's whole path; when it fails, cut it off and subtract it from its parent.

        a(root) = 1,  a(child) = min(1, a(u) P_u(x) / Q_u(x))      from the top
        the first leaf v in depth-first order is accepted with probability a(v); else v goes, and
        R = [a(u) P_u - Q_u]_+,  P_u <- norm(R),  a(u) <- sum R / (sum R + 1 - a(u))      u = parent
        (without replacement Q_u also loses the token of v and is renormalised)
        stop_v = a(v) (product over the nodes tried before v of 1 - a)
        next   = P_v as it is by then

    Exact for siblings drawn with or without replacement and for points (where it is the match
    rule). Block verification on a chain; never accepts fewer tokens on average than the recursive
    rule. As implemented, P_u is norm([p - t q]_+), and cutting off a child adds (sum [p - t q]_+)
    / (a(u) Q) to t, where Q is the mass of q that was not yet removed.
    """

    name: ClassVar[str] = "traversal"
    lossless: ClassVar[bool] = True
    takes: ClassVar[frozenset[Drawn]] = frozenset(Drawn)
    trees: ClassVar[bool] = True

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        if as_match(proposal):
            return MatchRule().stop(p, proposal)
        if proposal.tree.is_chain:
            return BlockRule().stop(p, proposal)
        stop: Tensor = self.weighed(p, proposal)[0]
        return stop

    def weigh(self, p: Tensor, proposal: Proposal) -> tuple[Tensor, Tensor]:
        return _traverse(p, proposal)

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        if as_match(proposal):
            return MatchRule().next(p, proposal, node)
        if proposal.tree.is_chain:
            return BlockRule().next(p, proposal, node)
        here = rows_of(p, node).double()
        t = self.weighed(p, proposal)[1].gather(1, node[:, None])[:, 0]
        return normalised(excess(here, children_law_at(proposal, node), t), fallback=here)


@dataclass
class _State:
    """Numbers of each node while the tree is cut down, all ``[B, M]``."""

    accept: Tensor  # a
    t: Tensor
    total: Tensor  # sum [p - t q]_+
    left: Tensor  # mass of q not yet removed
    cut: Tensor  # bool: some child is gone, so that `accept` no longer follows from the parent


def _traverse(p: Tensor, proposal: Proposal) -> tuple[Tensor, Tensor]:
    """Returns stop and t, both ``[B, M]``."""
    assert isinstance(proposal.law, Sampled)
    tree = proposal.tree
    at_child = at_drafted(p, proposal)  # [B, N]
    drafted = drafted_mass(proposal, torch.float64)
    there = drawable(proposal, drafted)
    rest_of_q = _after(proposal, there) if not proposal.law.with_replacement else None
    one = torch.ones_like(p[..., 0], dtype=torch.float64)
    state = _State(one, one * 0, one, one, one < 0)
    stop, alive = one * 0, one[:, :1]
    order = leaves_first(tree)
    for step in range(tree.size):
        node = order[:, step : step + 1]  # [B, 1]
        _from_top(state, at_child * there, drafted, tree)
        valid = (node <= proposal.counts[:, None]) & there.gather(1, node - 1)
        accept = torch.where(valid, state.accept.gather(1, node), 0.0)
        stop = stop.scatter(1, node, alive * accept)
        alive = alive * (1 - accept)
        _cut(state, p, rest_of_q, proposal, node, valid)
    return torch.cat([alive, stop[:, 1:]], 1), state.t


def _after(proposal: Proposal, there: Tensor) -> Tensor:
    """``[B, N]``: the mass of q that is left once a node and its elder siblings are gone."""
    assert isinstance(proposal.law, Sampled)
    tokens, tree = proposal.tokens, proposal.tree
    # Whoever is not to go stands in with the node's own token, which goes anyway.
    gone = torch.where(tree.elder & (proposal.valid & there)[:, None, :], tokens[:, None, :], -1)
    gone = torch.where(gone < 0, tokens[:, :, None], gone)  # [B, N, N]
    return proposal.law.q.scatter(-1, gone, 0.0).sum(-1, dtype=torch.float64)


def _from_top(state: _State, at: Tensor, drafted: Tensor, tree: Tree) -> None:
    """Sets ``accept`` of all nodes that still have all their children."""
    for level in range(1, tree.height + 1):
        t, total, left, above = (
            x.gather(1, tree.parents) for x in (state.t, state.total, state.left, state.accept)
        )
        over = (at - t * drafted).clamp(min=0) * left * above
        fresh = quotient(over, total * drafted).clamp(max=1)
        fresh = torch.cat([torch.ones_like(fresh[:, :1]), fresh], 1)
        state.accept = torch.where((tree.depth == level) & ~state.cut, fresh, state.accept)


def _cut(
    state: _State, p: Tensor, after: Tensor | None, proposal: Proposal, node: Tensor, valid: Tensor
) -> None:
    """Subtracts a rejected node ``[B, 1]`` from its parent, whose q has then ``after`` [B, N] left,
    where it does not keep all."""
    assert isinstance(proposal.law, Sampled)
    parent = proposal.tree.parents.gather(1, node - 1)  # [B, 1]
    a, t, total, left = (
        x.gather(1, parent) for x in (state.accept, state.t, state.total, state.left)
    )
    times = t + quotient(total, a * left)
    drawn_from = rows_of(proposal.law.q, node[:, 0] - 1).double()
    rest = excess(rows_of(p, parent[:, 0]).double(), drawn_from, times[:, 0]).sum(-1, keepdim=True)
    share = quotient(a * rest, total)  # sum [a P - Q]_+
    sure = a >= 1  # the root, and nodes that cannot be rejected any more
    accept = torch.where(sure, 1.0, quotient(share, share + 1 - a))
    valid = valid & (a > TINY)
    found = {"accept": accept, "t": times, "total": rest}
    if after is not None:
        found["left"] = after.gather(1, node - 1)
    for name, value in found.items():
        old = getattr(state, name)
        now = torch.where(valid, value, old.gather(1, parent))
        setattr(state, name, old.scatter(1, parent, now))
    state.cut = state.cut.scatter(1, parent, valid | state.cut.gather(1, parent))


def leaves_first(tree: Tree) -> Tensor:
    """Returns ``[B, M]``: the nodes in depth-first order, each after all of its descendants.

    That is the lexicographic order of the paths, if a path that ends comes after all that go on.

    >>> leaves_first(Tree.uniform([0, 0, 1], 1)).tolist()
    [[3, 1, 2, 0]]
    """
    paths = torch.where(tree.paths < 0, tree.size + 1, tree.paths)  # [B, M, N]
    order = torch.arange(tree.size + 1, device=paths.device).repeat(tree.rows, 1)
    for level in reversed(range(tree.height)):
        key = paths[..., level].gather(1, order)
        order = order.gather(1, key.argsort(dim=1, stable=True))
    return order
