"""The best shape that a draft can have at given costs, by dynamic programming.

Chen et al. 2024, "Sequoia" (arXiv 2402.12374), section 3.1, with chances that may differ by depth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from outpace.core.trees.tree_shape import AcceptanceProbs, TreeShape

Cost = Callable[[int, int], float]
"""What a round costs, by its nodes and its levels."""


@dataclass(frozen=True)
class BestShapes:
    """The best shapes of up to ``nodes`` nodes in ``levels`` levels."""

    nodes: int
    levels: int
    chances: AcceptanceProbs

    @cached_property
    def _tables(self) -> list[list[tuple[NDArray[np.float64], NDArray[np.int64]]]]:
        """By depth d and rank r, for each number of nodes 0..``nodes``: how many tokens are
        expected of the best family of siblings from rank r on, with all that is below them, once a
        node at depth d is accepted and the elder siblings are not; and how many nodes the sibling
        of rank r and its descendants then are."""
        tables: list[list[tuple[NDArray[np.float64], NDArray[np.int64]]]] = []
        below = np.zeros(self.nodes + 1)
        for siblings in reversed(self.chances[: self.levels]):
            ranks = []
            younger = np.zeros(self.nodes + 1)
            for chance in reversed(siblings):
                ranks.append(_best_split(chance * (1 + below), (1 - chance) * younger))
                younger = ranks[-1][0]
            tables.append(ranks[::-1])
            below = younger
        return tables[::-1]

    def expected(self, nodes: int) -> float:
        """Returns how many drafted tokens are expected to be accepted of the best shape with at
        most n nodes."""
        return float(self._tables[0][0][0][nodes]) if self.levels else 0.0

    def shape(self, nodes: int) -> TreeShape:
        """Returns that shape, the more probable nodes first."""
        parents: list[int] = []
        heap: list[tuple[float, int, int, int, int, int, float]] = []
        pushed = 0

        def push(depth: int, rank: int, nodes: int, parent: int, chance: float) -> None:
            nonlocal pushed
            if nodes and depth < self.levels and rank < len(self.chances[depth]):
                pushed += 1
                reached = chance * self.chances[depth][rank]
                heappush(heap, (-reached, pushed, depth, rank, nodes, parent, chance))

        push(0, 0, nodes, 0, 1.0)
        while heap:
            reached, _, depth, rank, nodes, parent, chance = heappop(heap)
            own = int(self._tables[depth][rank][1][nodes])
            parents.append(parent)
            push(depth + 1, 0, own - 1, len(parents), -reached)
            push(depth, rank + 1, nodes - own, parent, chance + reached)
        return TreeShape(tuple(parents))


def _best_split(
    own: NDArray[np.float64], others: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """For each number of nodes, how many of them go best to a node and its descendants, and not to
    its younger siblings, and what that brings.

    own: by the number of descendants; others: by the number of nodes that the siblings have.
    """
    count = len(own)
    totals = np.arange(count)
    spent = totals[:, None]  # on the node and its descendants
    left = totals[None, :] - spent  # [spent, total]
    worth = np.where(
        (spent >= 1) & (left >= 0), own[np.maximum(spent - 1, 0)] + others[left], -np.inf
    )
    worth[0, 0] = 0.0
    chosen = worth.argmax(0)
    return worth[chosen, totals], chosen


def best_shape(nodes: int, chances: AcceptanceProbs, cost: Cost) -> TreeShape:
    """Returns the shape with most tokens for its cost, of up to n nodes; the chances bound
    its depth and its siblings.

    >>> best_shape(4, [[0.9, 0.5]] * 4, lambda nodes, levels: 1 + 0.1 * (nodes + levels)).parents
    (0, 1, 2, 3)
    >>> best_shape(4, [[0.5, 0.4]] * 4, lambda nodes, levels: 1 + 0.1 * (nodes + levels)).parents
    (0, 0)
    """
    best, rate = TreeShape(()), 1 / cost(0, 0)
    for levels in range(1, len(chances) + 1):
        tables = BestShapes(nodes, levels, chances)
        for count in range(1, nodes + 1):
            promised = (1 + tables.expected(count)) / cost(count, levels)
            if promised > rate:
                best, rate = tables.shape(count), promised
    return best
