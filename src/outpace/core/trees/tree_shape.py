"""The shape of a draft before anything is drawn: who is whose parent, the same in every row.

Which shape is best depends on two things only: how likely a node's children are to be accepted, and
what a node and a level cost (Chen et al. 2024, "Sequoia", solve it exactly for equal costs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

MAX_TREE_NODES = 256
"""Nodes that are scored at once, at most."""

MAX_SIBLINGS = 4
"""Children of a node, at most, in trees that are grown: a fifth is hardly ever accepted."""

AcceptanceProbs = Sequence[Sequence[float]]
"""``chances[d][r]``: how likely the child of rank r (0: the eldest) of an accepted node at depth d
is to be accepted once its elder siblings are rejected."""

AcceptedRanks = list[tuple[int, int | None]]
"""What became of a draft, by depth: how many siblings stood there, and the accepted one's rank."""


@dataclass(frozen=True)
class TreeShape:
    """Parents of nodes 1..N; node 0 is the root. Parents come before their children and elder
    siblings before younger ones, so that the first n nodes are a shape, too.

    >>> TreeShape.branching([2, 1]).parents
    (0, 0, 1, 2)
    """

    parents: tuple[int, ...]

    @classmethod
    def chain(cls, length: int) -> TreeShape:
        """Returns the shape in which each node has one child."""
        return cls(tuple(range(length)))

    @classmethod
    def branching(cls, children: Sequence[int]) -> TreeShape:
        """Returns the shape with n children per node at each depth, level by level.

        >>> TreeShape.branching([3, 2]).levels
        ((1, 2, 3), (4, 5, 6, 7, 8, 9))
        """
        parents: list[int] = []
        above = [0]
        for count in children:
            begin = len(parents)
            parents += [parent for parent in above for _ in range(count)]
            above = list(range(begin + 1, len(parents) + 1))
        return cls(tuple(parents))

    @classmethod
    def of_paths(cls, paths: Sequence[Sequence[int]]) -> TreeShape:
        """Returns the shape of nodes that are named by their paths from the root: at each depth the
        rank among siblings, 0 for the eldest. So Medusa and EAGLE write their trees.

        The nodes keep their order where parents and elder siblings come first in it, and are
        sorted by depth where not. Raises ``ValueError``, with the path, where a node's parent or
        elder sibling is missing, or where it is named twice.

        >>> TreeShape.of_paths([[0], [0, 0], [1], [0, 1]]).parents
        (0, 1, 0, 1)
        """
        listed = [tuple(path) for path in paths]
        if not _in_order(listed):
            listed.sort(key=lambda path: (len(path), path))
        number: dict[tuple[int, ...], int] = {(): 0}
        for path in listed:
            missing = [before for before in _before(path) if before not in number]
            if missing:
                raise ValueError(f"{list(path)} without {list(missing[0])}")
            if path in number:
                raise ValueError(f"{list(path)} twice")
            number[path] = len(number)
        return cls(tuple(number[path[:-1]] for path in listed))

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The path of each node, as `of_paths` takes it.

        >>> TreeShape((0, 1, 0, 1)).paths
        ((0,), (0, 0), (1,), (0, 1))
        """
        found: list[tuple[int, ...]] = [()]
        for node, parent in enumerate(self.parents, 1):
            found.append((*found[parent], self.children[parent].index(node)))
        return tuple(found[1:])

    @classmethod
    def grown(cls, nodes: int, chances: AcceptanceProbs, level: float, node: float) -> TreeShape:
        """Returns the shape to which, time and again, the node was added that promises most for its
        cost: its first n nodes are then about the best n.

        level: cost of one level more, that is of a drafter's pass; node: of one node more to
        score. The chances bound depth and siblings.

        >>> TreeShape.grown(4, [[0.9, 0.5]] * 4, level=0.1, node=0.1).parents
        (0, 1, 2, 3)
        >>> TreeShape.grown(4, [[0.5, 0.4]] * 4, level=0.1, node=0.1).parents
        (0, 0, 1, 2)
        """
        parents: list[int] = []
        depth = [0]
        frontier = [(0, 0, 1.0)]  # parent, rank, chance that it comes to this child
        while frontier and len(parents) < nodes:
            height = max(depth)

            def gain(child: tuple[int, int, float], height: int = height) -> float:
                parent, rank, chance = child
                new_level = depth[parent] == height
                return chance * chances[depth[parent]][rank] / (node + level * new_level)

            best = max(frontier, key=gain)
            frontier.remove(best)
            parent, rank, chance = best
            accepted = chances[depth[parent]][rank]
            parents.append(parent)
            depth.append(depth[parent] + 1)
            if rank + 1 < len(chances[depth[parent]]):
                frontier.append((parent, rank + 1, chance * (1 - accepted)))
            if depth[-1] < len(chances):
                frontier.append((len(parents), 0, chance * accepted))
        return cls(tuple(parents))

    def first(self, nodes: int) -> TreeShape:
        """Returns the shape of the first n nodes, the same object each time."""
        if nodes >= self.size:
            return self
        if nodes not in self._parts:
            self._parts[nodes] = TreeShape(self.parents[:nodes])
        return self._parts[nodes]

    def up_to(self, depth: int) -> TreeShape:
        """Returns the shape without the nodes that are deeper than so.

        >>> TreeShape((0, 1, 2, 0)).up_to(2).parents
        (0, 1, 0)
        """
        if self.height <= depth:
            return self
        number = {0: 0}
        for node in range(1, self.size + 1):
            if self.depth[node] <= depth:
                number[node] = len(number)
        kept = [node for node in number if node]
        return TreeShape(tuple(number[self.parents[node - 1]] for node in kept))

    @cached_property
    def _parts(self) -> dict[int, TreeShape]:
        return {}

    @property
    def size(self) -> int:
        return len(self.parents)

    @cached_property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(self.size))

    @cached_property
    def depth(self) -> tuple[int, ...]:
        """The depth of each node, the root included."""
        found = [0]
        for parent in self.parents:
            found.append(found[parent] + 1)
        return tuple(found)

    @cached_property
    def height(self) -> int:
        return max(self.depth)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The children of each node, the root included, eldest first."""
        found: list[list[int]] = [[] for _ in range(self.size + 1)]
        for node, parent in enumerate(self.parents, 1):
            found[parent].append(node)
        return tuple(map(tuple, found))

    @cached_property
    def max_siblings(self) -> int:
        """The largest number of children of a node."""
        return max(map(len, self.children))

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """The nodes at each depth from 1 on, siblings together, in the order of their parents."""
        found = []
        above: tuple[int, ...] = (0,)
        while below := tuple(child for node in above for child in self.children[node]):
            found.append(below)
            above = below
        return tuple(found)

    def reached(self, chances: AcceptanceProbs) -> list[float]:
        """Returns how likely each of nodes 1..N is to be accepted.

        >>> TreeShape((0, 0, 1)).reached([[0.5, 0.5], [0.5]])
        [0.5, 0.25, 0.25]
        """
        found = [1.0]
        left = [1.0] * (self.size + 1)  # chance that it comes to the node's next child
        rank = [0] * (self.size + 1)
        for parent in self.parents:
            chance = chances[self.depth[parent]][rank[parent]]
            found.append(left[parent] * chance)
            left[len(found) - 1] = found[-1]
            left[parent] *= 1 - chance
            rank[parent] += 1
        return found[1:]

    def extended(self, size: int) -> TreeShape:
        """Returns the shape itself, with a chain after its first deepest node where it has fewer
        nodes than ``size``.

        >>> TreeShape((0, 0, 1)).extended(5).parents
        (0, 0, 1, 3, 4)
        >>> TreeShape(()).extended(2).parents
        (0, 1)
        """
        if size <= self.size:
            return self
        deepest = max(range(len(self.depth)), key=self.depth.__getitem__)
        return TreeShape((*self.parents, deepest, *range(self.size + 1, size)))

    def accepted_ranks(self, path: Sequence[int]) -> AcceptedRanks:
        """Returns what became of a draft of this shape of which ``path`` was accepted, as far as
        the path lies in it: a draft that was cut has other numbers.

        >>> TreeShape((0, 0, 1)).accepted_ranks([1])
        [(2, 0), (1, None)]
        >>> TreeShape((0, 0)).accepted_ranks([1, 2])
        [(2, 0)]
        """
        found: AcceptedRanks = []
        node = 0
        for accepted in path:
            siblings = self.children[node]
            if accepted not in siblings:
                return found
            found.append((len(siblings), siblings.index(accepted)))
            node = accepted
        if self.children[node]:
            found.append((len(self.children[node]), None))
        return found


def chain_ranks(drafted: int, accepted: int) -> AcceptedRanks:
    """Returns what became of a chain of which n tokens were accepted."""
    return [(1, 0)] * accepted + [(1, None)] * (accepted < drafted)


def ranks_if_verified(draft: Sequence[int], committed: Sequence[int]) -> AcceptedRanks:
    """Returns what would have become of a chain, as far as the committed tokens tell.

    >>> ranks_if_verified([1, 2, 3], [1, 5])
    [(1, 0), (1, None)]
    >>> ranks_if_verified([1, 2, 3], [1, 2])
    [(1, 0), (1, 0)]
    """
    pairs = zip(draft, committed, strict=False)
    same = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
    if same is None:
        return [(1, 0)] * min(len(draft), len(committed))
    return chain_ranks(len(draft), same)


def _before(path: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The nodes that must come before the one of a path: its parent and its next elder sibling."""
    parent, rank = path[:-1], path[-1]
    return [parent, *([(*parent, rank - 1)] if rank else [])]


def _in_order(paths: Sequence[tuple[int, ...]]) -> bool:
    known: set[tuple[int, ...]] = {()}
    for path in paths:
        if not known.issuperset(_before(path)):
            return False
        known.add(path)
    return True
