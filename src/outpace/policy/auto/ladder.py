"""The drafts that a controller chooses from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from outpace.core.trees.tree_shape import Chances, TreeShape

LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)
"""Nodes of the trees that are considered where the tree is ours to choose: the worth of each node
is known beforehand there, and few numbers do."""

CLOSELY = 16
"""Tokens of a chain, or nodes of a tree that the drafter makes as it likes, up to which each number
is considered."""

WIDE = (20, 24, 32, 40, 50, 60)
"""The numbers of them that are considered beyond."""


@dataclass(frozen=True)
class Ladder:
    """Drafts that contain each other: the first nodes of one tree, by their number.

    widths: the numbers of nodes to choose from, ascending from 0.
    """

    shape: TreeShape
    widths: tuple[int, ...]

    @classmethod
    def chains(cls, most: int) -> Ladder:
        """Returns the chains of up to n tokens.

        >>> Ladder.chains(30).widths[-4:]
        (16, 20, 24, 30)
        """
        wide = [length for length in WIDE if length < most]
        widths = sorted({*range(min(most, CLOSELY) + 1), *wide, most})
        return cls(TreeShape.chain(most), tuple(widths))

    @classmethod
    def by_level(cls, shape: TreeShape) -> Ladder:
        """Returns the trees that a shape makes if it is cut between two levels.

        >>> Ladder.by_level(TreeShape.branching([4, 2])).levels
        {0: 0, 4: 1, 12: 2}
        """
        return cls(shape, tuple(accumulate(map(len, shape.levels), initial=0)))

    @classmethod
    def by_node(cls, shape: TreeShape) -> Ladder:
        """Returns trees of the first nodes of a shape whose nodes stand in the order of their
        worth."""
        return cls(shape, tuple(length for length in LENGTHS if length <= shape.size))

    @cached_property
    def levels(self) -> dict[int, int]:
        """How many levels the tree of each width has."""
        heights = self.heights(self.widths[-1])
        return {width: heights[width] for width in self.widths}

    def heights(self, widest: int) -> list[int]:
        """Returns the levels of each number of nodes 0..widest; beyond the end of the shape each
        node counts as one more level."""
        inside = list(accumulate(self.shape.depth, max))
        return [*inside, *range(inside[-1] + 1, inside[-1] + 1 + widest)][: widest + 1]

    def tokens(self, chances: Chances, room: int, levels_per_node: float = 1.0) -> dict[int, float]:
        """Returns the expected tokens of a round for each width, with the one that every round
        brings. room: levels that may be used before the text ends. levels_per_node: of a chain's
        nodes, those that make a level, where they stand for trees whose shape is not known
        beforehand.

        >>> Ladder.chains(2).tokens([[0.5], [0.5]], room=9)
        {0: 1.0, 1: 1.5, 2: 1.75}
        """
        depth = self.shape.depth[1:]
        reached = zip(self.shape.reached(chances), depth, strict=True)
        total = list(accumulate((c if d <= room else 0.0 for c, d in reached), initial=1.0))
        if levels_per_node == 1:
            return {width: total[width] for width in self.widths}
        return {width: _between(total, width * levels_per_node) for width in self.widths}


def _between(values: Sequence[float], place: float) -> float:
    """The value at a place between two of a list, on the line between them."""
    low = min(int(place), len(values) - 1)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low])
