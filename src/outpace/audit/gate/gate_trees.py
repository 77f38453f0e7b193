"""The trees that the distribution gate drafts on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GateTree:
    """A tree by the parents of its nodes, and the size of the vocabulary to draft with."""

    name: str
    parents: tuple[int, ...]
    vocabulary: int = 3
    most_pairs: int | None = None
    """Model pairs that are enumerated at most; None: as many as are asked for."""

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
    GateTree("chain 1", (0,), 4),
    GateTree("chain 2", (0, 1)),
    GateTree("chain 3", (0, 1, 2)),
    GateTree("2 siblings", (0, 0), 4),
    GateTree("3 siblings", (0, 0, 0), 4),
    GateTree("1, then 2", (0, 1, 1)),
    # Mistakes that begin far from the root show on two tokens and few pairs, at a fraction of the
    # cost.
    GateTree("chain 6", (0, 1, 2, 3, 4, 5), 2, most_pairs=5),
    GateTree("4, then 2", (0, 1, 2, 3, 4, 4), 2, most_pairs=5),
    GateTree("2 chains of 2", (0, 1, 0, 3)),
)
FULL = (
    *FAST,
    GateTree("2, then 2 and 1", (0, 0, 1, 1, 2)),
    GateTree("chain 4", (0, 1, 2, 3)),
    GateTree("4 siblings", (0, 0, 0, 0), 4),
    GateTree("3 chains of 2", (0, 1, 0, 3, 0, 5), 2),
    GateTree("2, 2 each", (0, 0, 1, 1, 2, 2), 2),
    GateTree("3, then 1 each", (0, 0, 0, 1, 2, 3), 2),
    GateTree("2, then 1, 1", (0, 0, 1, 2, 3)),
    GateTree("3, 2, 1 deep", (0, 0, 0, 1, 1, 4), 2),
    GateTree("chain 5", (0, 1, 2, 3, 4)),
    GateTree("chain 8", (0, 1, 2, 3, 4, 5, 6, 7), 2, most_pairs=5),
    GateTree("2 chains of 4", (0, 1, 2, 3, 0, 5, 6, 7), 2, most_pairs=5),
    GateTree("4, 2, 1 each", (0, 1, 2, 3, 4, 4, 5, 6), 2, most_pairs=5),
)
