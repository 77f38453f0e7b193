"""Which tree to draft, where a drafter can draft any."""

from __future__ import annotations

from dataclasses import replace

from outpace.core.trees.tree_shape import LARGEST, Chances, TreeShape
from outpace.policy.auto.acceptance import Acceptance, prior
from outpace.policy.auto.ladder import LENGTHS, Ladder
from outpace.policy.auto.prices import Prices

DEEPEST = 8
"""Levels at most."""

SIBLINGS = 4
"""Children of a node at most, because a fifth one is hardly ever accepted."""

REGROWN = 64
"""Rounds after which the tree is grown anew from what has been learned since."""

CHEAPEST = 0.005
"""What a level or a node costs at least, in plain rounds, because noise makes some look free."""


def best_of_size(nodes: int, prices: Prices, deepest: int | None, siblings: int) -> TreeShape:
    """Returns the chain or tree of n nodes that promises most at typical chances, or the
    largest one that a drafter can draft. deepest, siblings: as for `Growing`.

    >>> best_of_size(24, Prices(level=0.3), None, siblings=4).size
    24
    """
    nodes = min(nodes, LARGEST)
    chances = [[prior(rank) for rank in range(siblings)]] * min(nodes, deepest or nodes)
    chain, tree = _grown(nodes, chances, prices)

    def promise(shape: TreeShape) -> tuple[int, float]:
        tokens = 1 + sum(shape.reached(chances))
        return shape.size, tokens / prices.round(shape.size, shape.height)

    return max(chain, tree, key=promise)


def _grown(nodes: int, chances: Chances, prices: Prices) -> tuple[TreeShape, TreeShape]:
    """The best chain and the best tree of n nodes."""
    only_eldest = [siblings[:1] for siblings in chances]
    chain = TreeShape.grown(nodes, only_eldest, prices.level, prices.node)
    return chain, TreeShape.grown(nodes, chances, prices.level, prices.node)


class Growing:
    """The trees to choose from: one by nominal costs and typical chances, which is the same in
    every run, and one by measured times and learned chances. A chain is a tree without siblings; it
    is cheaper, because no siblings have to be compared.
    """

    def __init__(
        self,
        prices: Prices,
        most: int = LENGTHS[-1],
        deepest: int | None = None,
        siblings: int = SIBLINGS,
    ) -> None:
        """most: nodes of the largest tree; deepest: levels that the drafter can draft, unless it is
        any number; siblings: children of a node at most."""
        self._siblings = siblings
        self._nominal, self._most = prices, min(most, LARGEST)
        self._deepest = min(DEEPEST, deepest or DEEPEST)
        typical = [[prior(rank) for rank in range(siblings)]] * self._deepest
        self.static = self._best(typical, prices)
        self.learned = self.static
        self._since = 0

    def due(self) -> bool:
        """Counts one more round; returns whether the tree should be grown anew."""
        self._since += 1
        return self._since >= REGROWN

    def grow(self, acceptance: Acceptance, slopes: tuple[float, float] | None) -> None:
        """Grows the tree by what was learned.

        slopes: what a level and a node more cost here, in plain rounds, if that is known.
        """
        if slopes is None:
            return
        self._since = 0
        level, node = (max(slope, CHEAPEST) for slope in slopes)
        prices = replace(self._nominal, level=level, node=node)
        self.learned = self._best(acceptance.typical(self._deepest, self._siblings), prices)

    def _best(self, chances: Chances, prices: Prices) -> Ladder:
        """Returns chains or trees, whichever promise more."""
        shapes = _grown(self._most, chances, prices)

        def promise(ladder: Ladder) -> float:
            found = ladder.tokens(chances, self._deepest).items()
            return max(n / prices.round(width, ladder.levels[width]) for width, n in found)

        return max(map(Ladder.by_node, shapes), key=promise)
