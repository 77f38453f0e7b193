"""Trees of given tokens that differ from row to row, as look-ups find them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from outpace.core.proposal import Point, Proposal
from outpace.core.transfer import to_device
from outpace.core.trees.tree import Tree
from outpace.draft.chains import point_chains


@dataclass
class Guess:
    """The nodes that one row drafts: parents before children, elder siblings before younger ones.

    ``parents[i]`` is the parent of node i + 1; 0 is the root.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    score: float = 0.0
    """Tokens that are expected to be accepted, by the drafter's own estimate."""

    def add(self, token: int, parent: int, chance: float = 0.0) -> int:
        """Appends a node and returns its number. chance: that it is accepted."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.score += chance
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(len(self.parents)))


def point_trees(guesses: Sequence[Guess], device: torch.device) -> Proposal:
    """Returns given trees, one per row, of any sizes and shapes, as a proposal."""
    if all(guess.is_chain for guess in guesses):
        return point_chains([guess.tokens for guess in guesses], device)
    width = max(len(guess.tokens) for guess in guesses)
    padding = [[0] * (width - len(guess.tokens)) for guess in guesses]
    tokens = [[*guess.tokens, *rest] for guess, rest in zip(guesses, padding, strict=True)]
    parents = [[*guess.parents, *rest] for guess, rest in zip(guesses, padding, strict=True)]
    counts = to_device([len(guess.tokens) for guess in guesses], device)
    tree = Tree(to_device(parents, device))
    return Proposal(to_device(tokens, device), tree, counts, Point())
