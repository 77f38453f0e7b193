"""Draft trees that follow the drafter's own probabilities, another one in every row.

EAGLE-2 (Li et al. 2024, arXiv 2406.16858), OPT-Tree (Wang et al. 2024, arXiv 2406.17276).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.core.gumbel import gumbel
from outpace.core.proposal import Deterministic, Proposal
from outpace.core.transfer import to_device
from outpace.core.trees.tree import Tree
from outpace.draft.base import Rows
from outpace.draft.trees import NextLogits, leading_to

MAX_DYNAMIC_NODES = 60
"""Nodes of a tree at most, where the engine chooses how many: EAGLE-2's number."""


@dataclass(frozen=True)
class DynamicTrees:
    """How trees grow: the ``top_k`` best nodes of each level are expanded, each by its ``top_k``
    most probable tokens, down to ``depth``."""

    top_k: int
    depth: int

    def __call__(
        self, rows: Rows, logits: Tensor, next_logits: NextLogits, budgets: Sequence[int]
    ) -> Proposal:
        """Returns the trees of the best nodes: as many as the budgets say, some at least 1.

        A node is worth the product of the drafter's probabilities on its path, which is the chance
        of its acceptance if the drafter is right. A child is never worth more than its parent, so
        that the best nodes make a tree. Their tokens were selected after their probabilities were
        seen, so that they are deterministic. What one row drafts does not depend on the others.

        logits: ``[B, V']``, at the root.
        """
        frontier = _Frontier.root(logits)
        distribution = _expected(rows, frontier, 1)
        wanted = to_device(rows.pipeline.limit_draft_counts(budgets), logits.device)
        found = _Candidates.none(logits)
        for level in range(1, self.depth + 1):
            best = distribution.topk(min(self.top_k, distribution.shape[-1]), -1)  # [B, W, k]
            found = found.joined(frontier, best.indices, best.values)
            # A node cannot be in the tree if as many of its level as a tree may have are better,
            # and if no node of a level can be, none that is deeper can.
            newest = best.values[0].numel()
            if level == self.depth or not found.kept(wanted)[:, -newest:].any():
                break
            expanded = min(self.top_k, max(budgets))
            frontier = frontier.below(found, best.values.shape[-1], expanded, next_logits)
            distribution = _expected(rows, frontier, level + 1)
        return found.proposal(wanted, max(budgets))


def _expected(rows: Rows, frontier: _Frontier, level: int) -> Tensor:
    """``[B, W, V]``: how likely each token is to be the target's next, as far as the drafter knows;
    under the coupled rule with the noise that the target's token is drawn with."""
    fed, width = frontier.fed, frontier.logits.shape[1]
    branches = leading_to(fed, frontier.tree, width)
    here = (frontier.logits, branches, rows.history)
    if not rows.coupled or rows.pipeline.all_greedy:
        return rows.pipeline.softmax_probs(*here)
    q = rows.pipeline(*here)
    noise = gumbel(rows.seeds[:, None], rows.positions[:, None] + (level - 1), q.shape[-1])
    return (q.double().log() + noise).softmax(-1).to(q.dtype)


@dataclass(frozen=True, eq=False)
class _Candidates:
    """All C nodes that were looked at, level by level."""

    tokens: Tensor  # [B, C]
    parents: Tensor  # [B, C], 0 for the root, 1..C
    path_probs: Tensor  # [B, C]

    @classmethod
    def none(cls, logits: Tensor) -> _Candidates:
        empty = torch.zeros(len(logits), 0, dtype=torch.long, device=logits.device)
        return cls(empty, empty, empty.float())

    def joined(self, frontier: _Frontier, tokens: Tensor, chances: Tensor) -> _Candidates:
        """Returns them with the children ``[B, W, k]`` of the frontier's nodes."""
        parents = frontier.nodes[..., None].expand_as(tokens)
        path_probs = frontier.path_probs[..., None] * chances.float()
        return _Candidates(
            torch.cat([self.tokens, tokens.flatten(1)], 1),
            torch.cat([self.parents, parents.flatten(1)], 1),
            torch.cat([self.path_probs, path_probs.flatten(1)], 1),
        )

    def kept(self, wanted: Tensor) -> Tensor:
        """``[B, C]`` bool: the best nodes of each row; of equal ones those nearer to the root."""
        order = self.path_probs.sort(dim=1, descending=True, stable=True).indices
        rank = torch.empty_like(order)
        rank.scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
        return (rank < wanted[:, None]) & (self.path_probs > 0)

    def proposal(self, wanted: Tensor, most: int) -> Proposal:
        """Returns the trees of the best nodes."""
        kept = self.kept(wanted)
        every = Proposal(self.tokens, Tree(self.parents), kept.sum(1), Deterministic())
        return every.keep(kept, most)


@dataclass(frozen=True, eq=False)
class _Frontier:
    """The W nodes of a level that are expanded, and all F nodes that were fed to get there."""

    nodes: Tensor  # [B, W] their numbers among the candidates; 0 is the root
    path_probs: Tensor  # [B, W]
    logits: Tensor  # [B, W, V']
    fed: Tensor  # [B, F] tokens
    tree: Tree

    @classmethod
    def root(cls, logits: Tensor) -> _Frontier:
        root = torch.zeros(len(logits), 1, dtype=torch.long, device=logits.device)
        ones = torch.ones_like(root, dtype=torch.float32)
        tree = Tree.chain(len(logits), 0, logits.device)
        return cls(root, ones, logits[:, None], root[:, :0], tree)

    def below(
        self, found: _Candidates, children: int, width: int, next_logits: NextLogits
    ) -> _Frontier:
        """Returns the best nodes of the next level, the newest of ``found``.

        children: of each node; width: nodes of the new frontier, at most.
        """
        newest = children * self.nodes.shape[1]
        before = found.path_probs.shape[1] - newest
        path_probs, place = found.path_probs[:, before:].sort(dim=1, descending=True, stable=True)
        path_probs, place = path_probs[:, :width], place[:, :width]
        parents = place // children  # of this frontier
        above = self.fed.shape[1] - self.nodes.shape[1] if self.fed.shape[1] else -1
        fed = torch.cat([self.fed, found.tokens[:, before:].gather(1, place)], 1)
        tree = Tree(torch.cat([self.tree.parents, parents + (above + 1)], 1))
        return _Frontier(
            place + (before + 1), path_probs, next_logits(fed, tree, parents), fed, tree
        )
