"""Draft trees, drawn level by level, for whatever drafts several candidates at a depth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from outpace.core.gumbel import gumbel
from outpace.core.logits.categorical import Categorical
from outpace.core.logits_pipeline import Branches
from outpace.core.proposal import Deterministic, Proposal, Sampled
from outpace.core.rng import Role, uniform
from outpace.core.transfer import to_device
from outpace.core.trees.tree import Tree
from outpace.core.trees.tree_shape import TreeShape
from outpace.draft.base import Rows

MAX_KEPT = 64
"""Shapes whose levels are kept: a shape that is learned changes now and then."""


@dataclass(frozen=True, eq=False)
class Level:
    """How the C nodes of one depth are drawn from the distributions of the W nodes that have
    them."""

    most: int
    """Children of each of the W nodes that are drawn; some have fewer."""
    node: Tensor  # [W * most] drafted index (node - 1) of each child, 0 where there is none
    drawn: Tensor  # [C] where in these the children are that there are
    parent: Tensor  # [C] which of the W nodes each belongs to
    inner: Tensor  # [W'] which of the C have children themselves


class TreeLevels:
    """How a shape is drafted: a pass per depth, over the nodes that have children.

    Nodes are drawn level by level; ``order`` puts them where the shape has them.
    """

    def __init__(self, shape: TreeShape, device: torch.device) -> None:
        self.shape = shape
        self._device = device
        drafted = [node for level in shape.levels for node in level]
        self.order = None
        if drafted != sorted(drafted):
            at = {node: place for place, node in enumerate(drafted)}
            self.order = self._index(at[node] for node in sorted(drafted))
        inner = [node for node in drafted if shape.children[node]]
        number = {0: 0, **{node: place for place, node in enumerate(inner, 1)}}
        self._fed = [number[shape.parents[node - 1]] for node in inner]
        self._trees: dict[tuple[int, int | None], Tree] = {}

    @cached_property
    def levels(self) -> list[Level]:
        """Those of all depths from 1 on."""
        return list(self._levels())

    def _levels(self) -> Iterator[Level]:
        above: Sequence[int] = (0,)
        for nodes in self.shape.levels:
            children = [self.shape.children[node] for node in above]
            most = max(map(len, children))
            grid = [[*row, *[0] * (most - len(row))] for row in children]
            flat = [node for row in grid for node in row]
            above = [node for node in nodes if self.shape.children[node]]
            yield Level(
                most,
                node=self._index(max(0, node - 1) for node in flat),
                drawn=self._index(place for place, node in enumerate(flat) if node),
                parent=self._index(place // most for place, node in enumerate(flat) if node),
                inner=self._index(nodes.index(node) for node in above),
            )

    def _index(self, values: Iterator[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.long, device=self._device)

    def tree(self, rows: int, fed: int | None = None) -> Tree:
        """Returns the tree of n rows, or that of its first n nodes with children, as
        these are numbered among themselves: made once, with all that a tree derives."""
        if (rows, fed) not in self._trees:
            parents = self.shape.parents if fed is None else self._fed[:fed]
            self._trees[rows, fed] = Tree.uniform(list(parents), rows, self._device)
        return self._trees[rows, fed]

    def ordered(self, drafted: Sequence[Tensor]) -> Tensor:
        """Returns ``[B, N, ...]`` from the levels' ``[B, C, ...]``."""
        joined = torch.cat(list(drafted), 1)
        return joined if self.order is None else joined[:, self.order]


class Siblings:
    """Draws the children of each node of a level from the node's distribution.

    Sampled rows draw them one after another, with or without replacement; greedy and coupled rows
    take the most probable ones (coupled: after adding the noise of the target's own token).
    """

    def __init__(
        self, rows: Rows, nodes: int, with_replacement: bool, random_stream: int = 0
    ) -> None:
        """nodes: of the whole draft. random_stream: the drafter's own."""
        self._rows = rows
        self._with_replacement = with_replacement
        self.sampled = not (rows.coupled or rows.pipeline.all_greedy)
        if self.sampled:
            self._u = uniform(
                rows.seeds_of(random_stream), rows.positions, Role.DRAFT, nodes
            )  # [B, N]

    def softmax_probs(self, logits: Tensor, branches: Branches, level: Level) -> Tensor | None:
        """Returns the distributions of the C nodes ``[B, C, V]`` before any argmax, if the rule
        asks for them. Arguments as of a call."""
        if not self._rows.terms.draft_probs:
            return None
        return self._rows.pipeline.softmax_probs(logits, branches, self._rows.history)[
            :, level.parent
        ]

    def __call__(
        self, logits: Tensor, branches: Branches, level: Level
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the C nodes of a level ``[B, C]``, and their distributions ``[B, C, V]``.

        logits, branches: of the W nodes that have them as children.
        """
        rows = self._rows
        if rows.pipeline.all_greedy and level.most == 1:
            return rows.pipeline.argmax_tokens(logits, branches, rows.history)[:, level.drawn], None
        if rows.pipeline.all_greedy:
            scores = rows.pipeline.process_logits(logits, branches, rows.history)
            return scores.topk(level.most, -1).indices.flatten(1)[:, level.drawn], None
        q = rows.pipeline(logits, branches, rows.history)  # [B, W, V]
        if rows.coupled:
            depth = branches.valid.sum(-1)  # [B, W]
            noise = gumbel(rows.seeds[:, None], rows.positions[:, None] + depth, q.shape[-1])
            best = (q.double().log() + noise).topk(level.most, -1).indices
            return best.flatten(1)[:, level.drawn], None
        u = self._u[:, level.node].view(*q.shape[:2], level.most)
        categorical = Categorical.of(q)
        tokens = categorical.draw(u) if self._with_replacement else _one_by_one(categorical, u)
        return tokens.flatten(1)[:, level.drawn], q[:, level.parent]


def _one_by_one(categorical: Categorical, u: Tensor) -> Tensor:
    """``[B, W, count]``, without replacement. Once a distribution has no token left, its further
    children are token 0 with nothing after them: their probability given their elders is 0, so no
    rule accepts them."""
    drawn = [categorical.draw(u[..., :1])]
    for child in range(1, u.shape[-1]):
        categorical.remove(drawn[-1])
        drawn.append(categorical.draw(u[..., child : child + 1]))
    return torch.cat(drawn, -1)


class NextLogits(Protocol):
    """What makes the logits of the next level: a pass of a draft model, a step of a head."""

    def __call__(self, fed: Tensor, tree: Tree, parents: Tensor) -> Tensor:
        """Returns the logits ``[B, W, V]`` at the last W nodes of ``fed`` [B, F], which are those
        of this level that have children.

        tree: of all that was fed; parents: ``[W]``, or ``[B, W]`` where each row has a tree of its
        own: to which node of the level above that was fed (the root, at first) each of the W
        belongs.
        """


class TreeLevelsCache:
    """The levels of the shapes that a drafter has drafted lately."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._levels_of: dict[TreeShape, TreeLevels] = {}

    def of(self, shape: TreeShape) -> TreeLevels:
        """Returns the levels of a shape."""
        if shape not in self._levels_of:
            if len(self._levels_of) >= MAX_KEPT:
                self._levels_of.clear()
            self._levels_of[shape] = TreeLevels(shape, self._device)
        return self._levels_of[shape]

    def chain(self, rows: int, nodes: int) -> Tree:
        """Returns the tree of chains of n nodes."""
        return self.of(TreeShape.chain(nodes)).tree(rows)


def draw_tree(
    tree_levels: TreeLevels,
    rows: Rows,
    logits: Tensor,
    next_logits: NextLogits,
    counts: Sequence[int],
    *,
    random_stream: int,
    with_replacement: bool,
) -> Proposal:
    """Returns trees of the shape, of which row b has the first ``counts[b]`` nodes.

    logits: ``[B, V]``, at the root.
    """
    pick = Siblings(rows, tree_levels.shape.size, with_replacement, random_stream)
    here = logits[:, None]  # [B, W, V]
    fed = rows.seeds.new_empty(len(rows), 0)
    drafted, probs, all_softmax_probs = [], [], []
    for level in tree_levels.levels:
        tree = tree_levels.tree(len(rows), fed.shape[1])
        branches = leading_to(fed, tree, here.shape[1])
        tokens, distribution = pick(here, branches, level)
        softmax_probs = pick.softmax_probs(here, branches, level)
        drafted.append(tokens)
        probs += [] if distribution is None else [distribution]
        all_softmax_probs += [] if softmax_probs is None else [softmax_probs]
        if len(level.inner):
            fed = torch.cat([fed, tokens[:, level.inner]], 1)
            tree = tree_levels.tree(len(rows), fed.shape[1])
            here = next_logits(fed, tree, level.parent[level.inner])
    drawn = (
        Sampled(tree_levels.ordered(probs), with_replacement) if pick.sampled else Deterministic()
    )
    counts = rows.pipeline.limit_draft_counts(counts)
    return Proposal(
        tree_levels.ordered(drafted),
        tree_levels.tree(len(rows)),
        to_device(counts, fed.device),
        drawn,
        draft_probs=tree_levels.ordered(all_softmax_probs) if all_softmax_probs else None,
    )


def leading_to(tokens: Tensor, tree: Tree, width: int) -> Branches:
    """Returns the branches of the last ``width`` nodes, the deepest level so far."""
    related = tree.ancestors[:, -width:, 1:]
    return Branches(tokens[:, None, :].expand(-1, width, -1), related)


def pruned(drafted: Proposal, wanted: Tensor) -> Proposal:
    """Returns a proposal without some nodes and what follows them, in the order that it had.

    wanted: ``[B, N]`` bool, the same of all siblings, and decided before they were drawn, so that
    those that stay have the distributions that they come with.
    """
    if drafted.tree.is_chain:
        return replace(drafted, counts=torch.minimum(drafted.counts, wanted.cumprod(1).sum(1)))
    away = torch.nn.functional.pad(~(wanted & drafted.valid), (1, 0))  # [B, 1 + N]
    return drafted.keep(~(drafted.tree.ancestors[:, 1:] & away[:, None]).any(-1))
