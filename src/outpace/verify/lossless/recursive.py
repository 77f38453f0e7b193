"""Recursive rejection sampling over siblings.

SpecInfer's multi-step speculative sampling (Miao et al. 2023, arXiv 2305.09781); with and without
replacement: Yang et al. 2024 (arXiv 2401.06706), Jeon et al. 2024 (arXiv 2402.14160).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from outpace.core.logits.pieces import pieces
from outpace.core.proposal import DraftSampling, Proposal, Sampled
from outpace.verify.base import Rule
from outpace.verify.lossless.match import MatchRule
from outpace.verify.probs import (
    draft_probs_at,
    normalize,
    p_of_drafted,
    q_of_drafted,
    ratio,
    select_node,
)
from outpace.verify.siblings import (
    child,
    children_probs_at,
    drawable,
    excess,
    in_turn,
    is_deterministic,
    left_over,
    possible_child,
    quotient,
    reach_probs,
    removed,
)


class RecursiveRule(Rule):
    """At each node try the children in turn, each against what its elder siblings left of p.

        r_0 = p,  s_0 = q
        a_i = min(1, r_{i-1}(x_i) / s_{i-1}(x_i)),  r_i = norm([r_{i-1} - s_{i-1}]_+)
        s_i = q with replacement; q without x_1 ... x_i, renormalised, without; the next sibling's
        own distribution where each has one
        stop_n = (product over the path of the step to each node) (1 - a_1) ... (1 - a_k)
        next   = r_k

    Exact for siblings drawn with or without replacement, in the order of their nodes, for siblings
    drawn independently from a distribution each (SpecInfer's several drafters), and for
    deterministic tokens (where it is the match rule). On a chain it is the token rule. Where
    siblings share a distribution, r_i is computed as norm([p - t_i q]_+) with t_0 = 0 and t_{i+1} =
    t_i + sum [p - t_i q]_+ / (q not yet removed). A child that q cannot produce any more (q was
    exhausted) is passed over.
    """

    name: ClassVar[str] = "recursive"
    lossless: ClassVar[bool] = True
    takes: ClassVar[frozenset[DraftSampling]] = frozenset(DraftSampling)
    trees: ClassVar[bool] = True

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        if is_deterministic(proposal):
            return MatchRule().stop(p, proposal)
        accept, _ = self.shared(p, proposal)
        step, stay = in_turn(accept, proposal)
        return reach_probs(step, proposal.tree) * stay

    def compute_shared(self, p: Tensor, proposal: Proposal) -> tuple[Tensor, Tensor | None]:
        if DraftSampling.of(proposal) is DraftSampling.PER_DRAFTER:
            return _each_by_its_distribution(p, proposal), None
        return _in_order(p, proposal)

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        if is_deterministic(proposal):
            return MatchRule().next(p, proposal, node)
        _, times = self.shared(p, proposal)
        here = select_node(p, node).double()
        if times is None:
            return _left_by_all(here, proposal, node)
        t = times.gather(1, node[:, None])[:, 0]
        return normalize(excess(here, children_probs_at(proposal, node), t), fallback=here)


def _in_order(p: Tensor, proposal: Proposal) -> tuple[Tensor, Tensor]:
    """Returns a ``[B, N]`` of each child, and t ``[B, M]`` of each node after all its children."""
    tree = proposal.tree
    at_child, drafted = p_of_drafted(p, proposal), q_of_drafted(proposal, torch.float64)  # [B, N]
    t = torch.zeros_like(p[..., 0], dtype=torch.float64)  # [B, M]
    total, left = torch.ones_like(t), torch.ones_like(t)  # sum [p - t q]_+, q not yet removed
    accept = torch.zeros_like(at_child)
    there = drawable(proposal, drafted)
    for rank in range(tree.max_siblings):
        over = (at_child - t.gather(1, tree.parents) * drafted).clamp(min=0)
        fresh = ratio(over * quotient(left, total).gather(1, tree.parents), drafted)
        accept = torch.where((tree.sibling_rank == rank) & there, fresh, accept)
        index = possible_child(proposal, rank, there)  # [B, M]
        t = torch.where(index >= 0, t + quotient(total, left), t)
        if rank + 1 < tree.max_siblings:
            _subtract(p, proposal, rank, t, there, total, left)
    return accept, t


def _subtract(
    p: Tensor,
    proposal: Proposal,
    rank: int,
    t: Tensor,
    there: Tensor,
    total: Tensor,
    left: Tensor,
) -> None:
    """Sets ``total`` and ``left`` [B, M] of the nodes that have a child after this rank.

    t: ``[B, M]``, with the child of this rank subtracted already.
    """
    assert isinstance(proposal.distribution, Sampled)
    fork = proposal.tree.forks[rank]
    at = (fork.row, fork.node)
    index = proposal.tree.child[rank][at]  # [F]
    gone = None
    if not proposal.distribution.with_replacement:
        gone = removed(proposal, there, fork.row, index)
    rest, kept = left_over(p, proposal, torch.stack([*at, index]), t[at], gone)
    total[at] = rest
    if kept is not None:
        left[at] = kept


# -- siblings with a distribution each -------------------------------------------------------------


def _each_by_its_distribution(p: Tensor, proposal: Proposal) -> Tensor:
    """Returns a ``[B, N]`` of each child. What elder siblings left of p is kept over the whole
    vocabulary, at the nodes with several children only."""
    assert isinstance(proposal.distribution, Sampled)
    accept = ratio(p_of_drafted(p, proposal), q_of_drafted(proposal, torch.float64))
    if proposal.tree.max_siblings < 2:
        return accept
    fork = proposal.tree.forks[0]
    for part in pieces(len(fork.row), p.shape[-1], p.device):
        row, node = fork.row[part], fork.node[part]
        left = p[row, node].double()  # [F, V]
        for rank in range(proposal.tree.max_siblings):
            index = child(proposal, rank)[row, node]  # [F], -1 for none
            (some,) = (index >= 0).nonzero(as_tuple=True)
            at = row[some], index[some]
            q = proposal.distribution.q[at].double()  # [F', V]
            drawn = proposal.tokens[at][:, None]
            accept[at] = ratio(left[some].gather(1, drawn), q.gather(1, drawn))[:, 0]
            left[some] = _left(left[some], q)
    return accept


def _left_by_all(here: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
    """Returns ``[B, V]``: what all children of a node leave of p there, ``here``."""
    left = here
    for rank in range(proposal.tree.max_siblings):
        index = child(proposal, rank).gather(1, node[:, None])[:, 0]  # [B], -1 for none
        q = draft_probs_at(proposal, index.clamp(min=0), here)
        left = torch.where((index >= 0)[:, None], _left(left, q), left)
    return left


def _left(left: Tensor, q: Tensor) -> Tensor:
    """norm([r - q]_+); r itself where nothing is left, which is where no sibling is refused."""
    return normalize(left - q, fallback=left)
