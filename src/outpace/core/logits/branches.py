"""The drafted tokens after which a distribution is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Branches:
    """The drafted tokens that lead to each of M nodes, beyond the committed history."""

    tokens: Tensor  # [B, M, D]
    valid: Tensor  # [B, M, D] bool

    @classmethod
    def root(cls, rows: int, device: torch.device | str = "cpu") -> Branches:
        """Returns the branches of the root alone: nothing drafted yet."""
        empty = torch.zeros(rows, 1, 0, dtype=torch.long, device=device)
        return cls(empty, empty.bool())

    def some(self, nodes: slice) -> Branches:
        """Returns the branches of some nodes."""
        return Branches(self.tokens[:, nodes], self.valid[:, nodes])

    def paths(self, row: int) -> list[list[int]]:
        """Returns the tokens that lead to each node of a row."""
        listed = zip(self.tokens[row].tolist(), self.valid[row].tolist(), strict=True)
        return [list(compress(tokens, valid)) for tokens, valid in listed]
