"""The drafts to choose from: chains and trees by their number of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import mul

from outpace.core.trees.tree_shape import MAX_SIBLINGS, MAX_TREE_NODES, AcceptanceProbs, TreeShape
from outpace.policy.acceptance import Acceptance, prior
from outpace.policy.costs import MAX_SAMPLES
from outpace.policy.nominal import NominalCosts

STEP = 4
"""Each size that is considered is larger than the one before it by one in this many nodes, and at
least by one."""


def candidate_sizes(most: int) -> tuple[int, ...]:
    """Returns the numbers of nodes that are considered.

    >>> candidate_sizes(24)
    (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 18, 22, 24)
    """
    found = [0]
    while found[-1] < most:
        found.append(min(most, found[-1] + max(1, found[-1] // STEP)))
    return tuple(found)


@dataclass(frozen=True)
class DraftSizes:
    """The drafts to choose from: the first 0, 1, ... nodes of one tree.

    values: the numbers of nodes to choose from, ascending from 0.
    """

    shape: TreeShape
    values: tuple[int, ...]

    @classmethod
    def chains(cls, most: int) -> DraftSizes:
        """Returns the chains of up to ``most`` tokens.

        >>> DraftSizes.chains(30).values[-4:]
        (18, 22, 27, 30)
        """
        return cls(TreeShape.chain(most), candidate_sizes(most))

    @classmethod
    def by_level(cls, shape: TreeShape) -> DraftSizes:
        """Returns the trees that a shape makes if it is cut between two levels.

        >>> DraftSizes.by_level(TreeShape.branching([4, 2])).levels
        {0: 0, 4: 1, 12: 2}
        """
        return cls(shape, tuple(accumulate(map(len, shape.levels), initial=0)))

    @classmethod
    def by_node(cls, shape: TreeShape) -> DraftSizes:
        """Returns the trees of the first nodes of a shape whose most valuable nodes come first."""
        return cls(shape, candidate_sizes(shape.size))

    @cached_property
    def levels(self) -> dict[int, int]:
        """How many levels the tree of each size has."""
        heights = self.heights(self.values[-1])
        return {size: heights[size] for size in self.values}

    @cached_property
    def _inside(self) -> list[int]:
        return list(accumulate(self.shape.depth, max))

    def heights(self, largest: int) -> list[int]:
        """Returns the levels of the trees of 0..largest nodes; each node beyond the end of the
        shape counts as one more level."""
        inside, last = self._inside, self._inside[-1]
        beyond = largest + 1 - len(inside)
        return [*inside[: largest + 1], *range(last + 1, last + 1 + beyond)]

    def tokens(
        self, chances: AcceptanceProbs, room: int, levels_per_node: float = 1.0
    ) -> dict[int, float]:
        """Returns the expected tokens of a round for each size, with the one that every round
        brings. room: levels that may be used before the text ends. levels_per_node: less than 1
        where the drafter makes trees whose shape is not known beforehand, and the chain here stands
        for them.

        >>> DraftSizes.chains(2).tokens([[0.5], [0.5]], room=9)
        {0: 1.0, 1: 1.5, 2: 1.75}
        """
        if self.shape.is_chain:
            reached = accumulate((chance for chance, *_ in chances[: max(0, room)]), mul)
            total = list(accumulate(reached, initial=1.0))
            total += total[-1:] * (self.shape.size + 1 - len(total))
        else:
            depths = zip(self.shape.reached(chances), self.shape.depth[1:], strict=True)
            total = list(accumulate((c if d <= room else 0.0 for c, d in depths), initial=1.0))
        if levels_per_node == 1:
            return {size: total[size] for size in self.values}
        return {size: _between(total, size * levels_per_node) for size in self.values}


def _between(values: Sequence[float], place: float) -> float:
    """The value at a place between two of a list, on the line between them."""
    low = min(int(place), len(values) - 1)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low])


# -- trees that are grown --------------------------------------------------------------------------

MAX_GROWN_NODES = 24
"""Nodes of a grown tree, at most."""


def best_of_size(
    nodes: int, costs: NominalCosts, max_depth: int | None, siblings: int
) -> TreeShape:
    """Returns the chain or tree of ``nodes`` nodes that promises most at typical chances, or the
    largest one that a drafter can draft. max_depth, siblings: as for `GrownTrees`.

    >>> best_of_size(24, NominalCosts(level=0.3), None, siblings=4).size
    24
    """
    nodes = min(nodes, MAX_TREE_NODES)
    chances = [[prior(rank) for rank in range(siblings)]] * min(nodes, max_depth or nodes)
    chain, tree = _grown(nodes, chances, costs)

    def promise(shape: TreeShape) -> tuple[int, float]:
        tokens = 1 + sum(shape.reached(chances))
        return shape.size, tokens / costs.round(shape.size, shape.height)

    return max(chain, tree, key=promise)


def _grown(
    nodes: int, chances: AcceptanceProbs, costs: NominalCosts
) -> tuple[TreeShape, TreeShape]:
    """The best chain and the best tree of ``nodes`` nodes."""
    only_eldest = [siblings[:1] for siblings in chances]
    chain = TreeShape.grown(nodes, only_eldest, costs.level, costs.node)
    return chain, TreeShape.grown(nodes, chances, costs.level, costs.node)


class GrownTrees:
    """The trees to choose from: ``static`` follows from nominal costs and prior chances and is the
    same in every run; ``learned`` follows from measured times and learned chances. Each is a tree
    or a chain, whichever promises more: a chain is cheaper, because no siblings are compared.
    """

    def __init__(
        self,
        costs: NominalCosts,
        most: int = MAX_GROWN_NODES,
        max_depth: int | None = None,
        siblings: int = MAX_SIBLINGS,
    ) -> None:
        """most: nodes of the largest tree; max_depth: levels that the drafter can draft, unless it
        is any number; siblings: children of a node at most."""
        self._siblings = siblings
        self._nominal, self._most = costs, min(most, MAX_TREE_NODES)
        self._max_depth = min(self._most, max_depth or self._most)
        typical = [[prior(rank) for rank in range(siblings)]] * self._max_depth
        self.static = self._best(typical, costs)
        self.learned = self.static
        self._since = 0

    def due(self) -> bool:
        """Counts one more round; returns whether the tree should be grown anew."""
        self._since += 1
        return self._since >= MAX_SAMPLES

    def grow(self, acceptance: Acceptance, marginal_costs: tuple[float, float] | None) -> None:
        """Grows the tree by what was learned.

        marginal_costs: what a level and a node more cost here, in plain rounds, if that is known.
        """
        if marginal_costs is None:
            return
        self._since = 0
        # Noise may make a level or a node look free. The largest tree is no cheaper than a round.
        level, node = (max(cost, 1 / MAX_TREE_NODES) for cost in marginal_costs)
        costs = replace(self._nominal, level=level, node=node)
        self.learned = self._best(acceptance.typical(self._max_depth, self._siblings), costs)

    def _best(self, chances: AcceptanceProbs, costs: NominalCosts) -> DraftSizes:
        """Returns chains or trees, whichever promise more."""
        shapes = _grown(self._most, chances, costs)

        def promise(sizes: DraftSizes) -> float:
            found = sizes.tokens(chances, self._max_depth).items()
            return max(n / costs.round(size, sizes.levels[size]) for size, n in found)

        return max(map(DraftSizes.by_node, shapes), key=promise)
