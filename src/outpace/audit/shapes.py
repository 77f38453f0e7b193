"""The trees that the gate drafts on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A tree to draft on."""

    name: str
    parents: tuple[int, ...]
    vocabulary: int = 3

    @property
    def is_chain(self) -> bool:
        return list(self.parents) == list(range(len(self.parents)))

    @property
    def depth(self) -> int:
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return max(depths)


FAST = (
    Shape("chain 1", (0,), 4),
    Shape("chain 2", (0, 1)),
    Shape("chain 3", (0, 1, 2)),
    Shape("2 siblings", (0, 0), 4),
    Shape("3 siblings", (0, 0, 0), 4),
    Shape("1, then 2", (0, 1, 1)),
    Shape("2 chains of 2", (0, 1, 0, 3)),
)
FULL = (
    *FAST,
    Shape("2, then 2 and 1", (0, 0, 1, 1, 2)),
    Shape("chain 4", (0, 1, 2, 3)),
    Shape("4 siblings", (0, 0, 0, 0), 4),
    Shape("3 chains of 2", (0, 1, 0, 3, 0, 5), 2),
    Shape("2, 2 each", (0, 0, 1, 1, 2, 2), 2),
    Shape("3, then 1 each", (0, 0, 0, 1, 2, 3), 2),
    Shape("2, then 1, 1", (0, 0, 1, 2, 3)),
    Shape("3, 2, 1 deep", (0, 0, 0, 1, 1, 4), 2),
)
