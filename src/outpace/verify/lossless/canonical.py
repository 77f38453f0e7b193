"""Canonical decomposition: choose one draft by weights, then verify that one.

Khisti et al. 2024, "Multi-draft speculative sampling: canonical decomposition and theoretical
limits" (arXiv 2410.18234).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor

from outpace.core.logits.pieces import pieces
from outpace.core.proposal import DraftSampling, Proposal, Sampled
from outpace.verify.base import Rule
from outpace.verify.lossless.match import MatchRule
from outpace.verify.lossless.selection import best_pairing
from outpace.verify.probs import normalize, p_of_drafted, ratio, select_node
from outpace.verify.siblings import (
    child,
    is_deterministic,
    merged,
    reach_merged,
)


@dataclass(frozen=True)
class CanonicalRule(Rule):
    """At each node choose one child by weights, and verify it against the distribution of the
    choice.

        p_I = distribution of the token chosen among the k children
        a(y) = min(1, p(y) / p_I(y)) for the chosen y
        stop_n = (product over the path of weight times a) (1 - sum of weight times a)
        next   = norm([p - p_I]_+)

    The choice is a knock-out: the winner so far, with distribution q_1, meets the next child, with
    distribution q_2 = q. Of the pair {i, j} token i is taken with the weight w_ij, so that

        p_I(y) = q_1(y) q_2(y) + sum over j of (q_1(y) q_2(j) + q_1(j) q_2(y)) w_yj

    For pairs of the ``alphabet`` tokens of most drafted mass, the weights maximise sum min(p, p_I)
    by linear programme; for all other pairs the token with the larger p / q is taken. Exact
    whatever the weights, since p_I is the distribution that they really have. With two children and
    an alphabet that covers the vocabulary no rule accepts more. Slow (a programme for each node, on
    the CPU): a reference. One child: the token rule. Deterministic tokens: the match rule. Trees:
    as for `KSeqRule`.
    """

    alphabet: Annotated[int, Ge(0)] = 12
    """Tokens of most drafted mass whose pairs are weighed by a linear programme."""

    name: ClassVar[str] = "canonical"
    lossless: ClassVar[bool] = True
    takes: ClassVar[frozenset[DraftSampling]] = frozenset(
        {DraftSampling.DETERMINISTIC, DraftSampling.IID}
    )
    trees: ClassVar[bool] = True

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        if is_deterministic(proposal):
            return MatchRule().stop(p, proposal)
        choice = self.shared(p, proposal)
        pooled = choice.proposal
        step = choice.chance * ratio(p_of_drafted(p, pooled), choice.induced)
        leave: Tensor = (pooled.tree.child_of * step[:, None, :]).sum(-1)
        return reach_merged(step, pooled.tree, choice.stands) * (1 - leave).clamp(min=0)

    def compute_shared(self, p: Tensor, proposal: Proposal) -> _Choice:
        return _choose(p, *merged(proposal), self.alphabet)

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        if is_deterministic(proposal):
            return MatchRule().next(p, proposal, node)
        choice: _Choice = self.shared(p, proposal)
        rows = torch.arange(node.shape[0], device=node.device)
        tables = choice.tables[choice.place[rows, node]]
        knocked_out = _knock_out(p, choice.proposal, rows, node, self.alphabet, tables)
        here = select_node(p, node).double()
        return normalize(here - knocked_out.induced, fallback=here)


@dataclass(frozen=True, eq=False)
class _Choice:
    """How the child that is verified is chosen, at every node."""

    proposal: Proposal  # with the children of equal nodes pooled
    stands: Tensor  # [B, M] who stands for each node in it
    chance: Tensor  # [B, N] probability that each child is the chosen one, given its siblings
    induced: Tensor  # [B, N] p_I of each drafted token, at its parent
    tables: Tensor  # [F, W - 1, A, A] weights of the F nodes with children, one table per meeting
    place: Tensor  # [B, M] which of the F nodes each node is, 0 if it has no children


@dataclass(frozen=True, eq=False)
class _KnockOut:
    """What came of the knock-outs at F nodes."""

    child: Tensor  # [F, W] drafted index of each child, -1 for none
    chance: Tensor  # [F, W] probability that each child won
    induced: Tensor  # [F, V] p_I
    tables: Tensor  # [F, W - 1, A, A]


def _choose(p: Tensor, proposal: Proposal, stands: Tensor, alphabet: int) -> _Choice:
    """Returns the choice at every node. The knock-outs are held a few nodes at a time."""
    row, node = (proposal.tree.child[0] >= 0).nonzero(as_tuple=True)  # [F]
    place = torch.zeros_like(stands)
    place[row, node] = torch.arange(len(row), device=row.device)
    chance = torch.zeros_like(proposal.tokens, dtype=torch.float64)
    induced = torch.zeros_like(chance)
    tables = []
    for part in pieces(len(row), p.shape[-1], p.device):
        found = _knock_out(p, proposal, row[part], node[part], alphabet)
        at, rank = (found.child >= 0).nonzero(as_tuple=True)
        child = (row[part][at], found.child[at, rank])
        chance[child] = found.chance[at, rank]
        induced[child] = found.induced[at, proposal.tokens[child]]
        tables.append(found.tables)
    return _Choice(proposal, stands, chance, induced, torch.cat(tables), place)


def _knock_out(
    p: Tensor,
    proposal: Proposal,
    row: Tensor,
    node: Tensor,
    alphabet: int,
    known: Tensor | None = None,
) -> _KnockOut:
    """Returns the knock-outs at F nodes, given by row and node ``[F]``.

    known: ``[F, W - 1, A, A]``, their tables if they were solved before. (A programme may have
    several solutions, and `stop` and `next` have to go by the same.)
    """
    assert isinstance(proposal.distribution, Sampled)
    width = proposal.tree.max_siblings
    listed = torch.stack([child(proposal, rank)[row, node] for rank in range(width)], 1)  # [F, W]
    there, index = listed >= 0, listed.clamp(min=0)
    here = p[row, node].double()
    q = proposal.distribution.q[row, index[:, 0]].double() * there[:, :1]  # [F, V]
    tokens, each = proposal.tokens[row[:, None], index], torch.arange(len(row), device=row.device)
    chance = torch.zeros_like(tokens, dtype=torch.float64)
    chance[:, 0] = there[:, 0].double()
    size = min(alphabet, p.shape[-1])
    induced, tables = q, here.new_zeros(len(row), width - 1, size, size)
    for rank in range(1, width):
        meets = there[:, rank]
        if not bool(meets.any()):
            break  # nobody has a younger child either
        solved = known[:, rank - 1] if known is not None else None
        pairing = best_pairing(here, induced, q, alphabet, meets, solved)
        weight = pairing.weight(each[:, None], tokens[:, :rank], tokens[:, rank : rank + 1])
        kept = torch.where(meets[:, None], chance[:, :rank] * weight, chance[:, :rank])
        chance[:, rank] = (chance[:, :rank] - kept).sum(-1)
        chance[:, :rank] = kept
        induced = torch.where(meets[:, None], pairing.induced, induced)
        tables[:, rank - 1] = pairing.table
    return _KnockOut(listed, chance, induced, tables)
