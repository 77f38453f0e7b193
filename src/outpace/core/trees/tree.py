"""The shape of what is drafted: a tree of nodes under the last committed token.

Node 0 is the root, the last committed token. Nodes 1..N are the drafted tokens, and a node's parent
always has a smaller number. A chain is the tree in which the parent of n is n - 1.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Fork:
    """F nodes with several children, over all rows."""

    row: Tensor  # [F]
    node: Tensor  # [F]


@dataclass(frozen=True, eq=False)
class SiblingGroup:
    """The F drafted nodes, over all rows, that have the same depth and the same sibling rank."""

    row: Tensor  # [F]
    parent: Tensor  # [F] the node that each is a child of
    child: Tensor  # [F] the drafted index (node - 1) of each
    has_younger: bool  # whether some of them have a younger sibling


@dataclass(frozen=True, eq=False)
class Tree:
    """Parents of the drafted nodes of B rows.

    ``parents[b, n - 1]`` is the parent of node n of row b.

    >>> Tree.chain(1, 3).parents.tolist()
    [[0, 1, 2]]
    """

    parents: Tensor  # [B, N]
    is_chain: bool = False

    @classmethod
    def chain(cls, rows: int, length: int, device: torch.device | str = "cpu") -> Tree:
        """Returns the tree in which each node has one child."""
        return cls(torch.arange(length, device=device).expand(rows, length), is_chain=True)

    @classmethod
    def uniform(cls, parents: list[int], rows: int, device: torch.device | str = "cpu") -> Tree:
        """Returns the same tree for every row, from a list of parents."""
        shared = torch.tensor(parents, dtype=torch.long, device=device)
        chain = parents == list(range(len(parents)))
        return cls(shared.expand(rows, len(parents)), is_chain=chain)

    def to(self, device: torch.device) -> Tree:
        """Returns the same tree on a device."""
        here = self.parents.device == device
        return self if here else Tree(self.parents.to(device), self.is_chain)

    @property
    def rows(self) -> int:
        return self.parents.shape[0]

    @property
    def size(self) -> int:
        """Number of drafted nodes, N."""
        return self.parents.shape[1]

    @cached_property
    def ancestors(self) -> Tensor:
        """``[B, M, M]`` bool: [b, n, a] is true where a is n itself or an ancestor of n."""
        rows, size = self.parents.shape
        eye = torch.eye(size + 1, dtype=torch.bool, device=self.parents.device)
        if self.is_chain:
            return torch.ones_like(eye).tril().expand(rows, -1, -1)
        # Each step doubles how far up a node sees: what it sees already, and what the highest node
        # that it sees can see. The root is its own parent.
        table, up = eye.expand(rows, -1, -1), torch.nn.functional.pad(self.parents, (1, 0))
        table = table | eye[up]
        for _ in range((size - 1).bit_length()):
            up = up.gather(1, up)
            table = table | table.gather(1, up[..., None].expand_as(table))
        return table

    @cached_property
    def depth(self) -> Tensor:
        """``[B, M]``: 0 for the root, 1 for its children, and so on."""
        return self.ancestors.sum(-1) - 1

    @cached_property
    def paths(self) -> Tensor:
        """``[B, M, N]``: the nodes from depth 1 down to each node, then -1.

        >>> Tree.uniform([0, 0, 2], 1).paths.tolist()
        [[[-1, -1, -1], [1, -1, -1], [2, -1, -1], [2, 3, -1]]]
        """
        size = self.size
        nodes = torch.arange(1, size + 1, device=self.parents.device)
        listed = torch.where(self.ancestors[:, :, 1:], nodes, size + 1).sort(-1).values
        return torch.where(listed > size, -1, listed)

    @cached_property
    def child_of(self) -> Tensor:
        """``[B, M, N]`` bool: [b, n, c] is true where drafted node c + 1 is a child of n."""
        nodes = torch.arange(self.size + 1, device=self.parents.device)
        return self.parents[:, None, :] == nodes[None, :, None]

    @cached_property
    def elder(self) -> Tensor:
        """``[B, N, N]`` bool: [b, n, e] is true where drafted node e is an elder sibling of n."""
        return (self.parents[:, :, None] == self.parents[:, None, :]).tril(-1)

    @cached_property
    def sibling_rank(self) -> Tensor:
        """``[B, N]``: how many elder siblings each drafted node has."""
        return self.elder.sum(-1)

    # -- what waits for the device, once for a tree, unless it is a chain ------------------------

    @cached_property
    def max_siblings(self) -> int:
        """The largest number of children of a node."""
        if self.is_chain or not self.size:
            return min(1, self.size)
        return int(self.sibling_rank.max()) + 1

    @cached_property
    def height(self) -> int:
        """The depth of the deepest node."""
        return self.size if self.is_chain else int(self.depth.max())

    @cached_property
    def child(self) -> Tensor:
        """``[W, B, M]``: the drafted index (node - 1) of each node's child of each rank, or -1."""
        ranks = torch.arange(self.max_siblings, device=self.parents.device)[:, None, None, None]
        chosen = self.child_of & (self.sibling_rank[:, None, :] == ranks)  # [W, B, M, N]
        return torch.where(chosen.any(-1), chosen.int().argmax(-1), -1)

    @cached_property
    def sibling_groups(self) -> list[SiblingGroup]:
        """The drafted nodes by depth and, among those of one depth, by sibling rank."""
        key = (self.depth[:, 1:] * self.size + self.sibling_rank).flatten()
        kinds, order = key.sort(stable=True)
        row, child = order // self.size, order % self.size
        nodes = torch.stack([row, self.parents[row, child], child])  # [3, B N]
        sizes = Counter(kinds.tolist())  # in this order
        parts = torch.split(nodes, list(sizes.values()), 1)
        found = []
        for kind, part in zip(sizes, parts, strict=True):
            row, parent, child = part.unbind()
            found.append(SiblingGroup(row, parent, child, has_younger=kind + 1 in sizes))
        return found

    @cached_property
    def leaves_first(self) -> Tensor:
        """``[B, M]``: the nodes in depth-first order, each after all of its descendants.

        That is the lexicographic order of the paths, if a path that ends comes after all that go
        on.

        >>> Tree.uniform([0, 0, 1], 1).leaves_first.tolist()
        [[3, 1, 2, 0]]
        """
        paths = torch.where(self.paths < 0, self.size + 1, self.paths)  # [B, M, N]
        order = torch.arange(self.size + 1, device=paths.device).repeat(self.rows, 1)
        for level in reversed(range(self.height)):
            key = paths[..., level].gather(1, order)
            order = order.gather(1, key.argsort(dim=1, stable=True))
        return order

    @cached_property
    def forks(self) -> list[Fork]:
        """The nodes with more than 1, 2, ... children, each a part of those before."""
        count = self.child_of.sum(-1)  # [B, M]
        row, node = (count > 1).nonzero(as_tuple=True)
        found = [Fork(row, node)]
        for rank in range(2, self.max_siblings):
            last = found[-1]
            (among,) = (count[last.row, last.node] > rank).nonzero(as_tuple=True)
            found.append(Fork(last.row[among], last.node[among]))
        return found
