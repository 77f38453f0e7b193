"""Trees of tokens on the host, one for each row: what drafters find, and what a proposal says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from outpace.core.proposal import Deterministic, Proposal
from outpace.core.transfer import padded, to_device
from outpace.core.trees.tree import Tree


@dataclass
class TokenTree:
    """The nodes that one row drafts: parents before children, elder siblings before younger ones.

    Nodes count from 1, and 0 is the root: node n says ``tokens[n - 1]`` after ``parents[n - 1]``.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    """Each node's chance to be accepted, by the drafter's own estimate; empty without any."""
    confidence: list[float] = field(default_factory=list)
    """How sure the drafter is of each token of a chain (`Proposal.confidence`), if it says so."""
    predicted: bool = False
    """Whether it is from the text that was predicted for the request."""

    @classmethod
    def chain(cls, tokens: Iterable[int]) -> TokenTree:
        """Returns the tree in which each token follows the one before it."""
        listed = list(tokens)
        return cls(listed, list(range(len(listed))))

    def __len__(self) -> int:
        """How many nodes there are."""
        return len(self.tokens)

    def add(self, token: int, parent: int, chance: float | None = None) -> int:
        """Appends a node and returns its number. chance: that it is accepted."""
        self.tokens.append(token)
        self.parents.append(parent)
        if chance is not None:
            self.chances.append(chance)
        return len(self.tokens)

    @property
    def height(self) -> int:
        """How many levels there are.

        >>> TokenTree([5, 7, 8], [0, 0, 2]).height
        2
        """
        depths = [0]
        for parent in self.parents:
            depths.append(1 + depths[parent])
        return max(depths)

    @property
    def expected_tokens(self) -> float:
        """Tokens that are expected to be accepted, by the drafter's own estimate."""
        return sum(self.chances)

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(len(self.parents)))

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """Returns the nodes that say the first of these tokens, from the root down, as far as any
        do.

        >>> TokenTree([5, 7, 8], [0, 0, 2]).follow([7, 8, 9])
        [2, 3]
        """
        path, here = [], 0
        for token in tokens:
            nodes = enumerate(zip(self.parents, self.tokens, strict=True), 1)
            here = next((number for number, said in nodes if said == (here, token)), -1)
            if here < 0:
                break
            path.append(here)
        return path

    def eldest(self) -> dict[int, int]:
        """Returns the first child of each node that has any.

        >>> TokenTree([5, 7, 8], [0, 0, 2]).eldest()
        {2: 3, 0: 1}
        """
        numbered = list(enumerate(self.parents, 1))
        return {parent: number for number, parent in reversed(numbered)}

    def eldest_chain(self) -> list[int]:
        """Returns the tokens of the path of first children."""
        eldest, chain, here = self.eldest(), [], 0
        while here in eldest:
            here = eldest[here]
            chain.append(self.tokens[here - 1])
        return chain


def merged(trees: Iterable[TokenTree], most: int | None = None) -> TokenTree:
    """Returns one tree of several, in which equal paths are one; those of earlier trees come first.
    Either all of them say chances, or none.

    most: nodes at which it is cut; None for all.

    >>> merged([TokenTree.chain([5, 6]), TokenTree.chain([5, 7]), TokenTree.chain([8, 9])], most=4)
    TokenTree(tokens=[5, 6, 7, 8], parents=[0, 1, 1, 0], chances=[], confidence=[], predicted=False)
    """
    tree = TokenTree()
    known: dict[tuple[int, int], int] = {}
    for one in trees:
        place = [0]  # where each node of this one is in the merged tree
        chances: Sequence[float | None] = one.chances or [None] * len(one)
        for token, parent, chance in zip(one.tokens, one.parents, chances, strict=True):
            key = (place[parent], token)
            if key not in known:
                if len(tree) == most:
                    return tree
                known[key] = tree.add(token, place[parent], chance)
            place.append(known[key])
    return tree


def token_trees_of(proposal: Proposal) -> list[TokenTree]:
    """Returns the valid nodes of each row, in their order: one transfer from the device."""
    size = proposal.tree.size
    if not size:
        return [TokenTree() for _ in range(len(proposal.counts))]
    parts = [proposal.counts[:, None], proposal.tokens, proposal.tree.parents]
    return [
        TokenTree(row[1 : 1 + row[0]], row[1 + size : 1 + size + row[0]])
        for row in torch.cat(parts, 1).tolist()
    ]


def deterministic_trees(trees: Sequence[TokenTree], device: torch.device) -> Proposal:
    """Returns fixed trees, one per row, of any sizes and shapes, as a proposal."""
    width = max(map(len, trees), default=0)
    tokens = padded([one.tokens for one in trees], device)
    counts = to_device([len(one) for one in trees], device)
    if all(one.is_chain for one in trees):
        tree = Tree.chain(len(trees), width, device)
    else:
        parents = [[*one.parents, *range(len(one), width)] for one in trees]
        tree = Tree(to_device(parents, device))
    predicted = [one.predicted for one in trees]
    return Proposal(tokens, tree, counts, Deterministic(), predicted=predicted)
