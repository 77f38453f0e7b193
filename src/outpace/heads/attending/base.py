"""What heads that attend over the whole text have in common: EAGLE and its relatives.

Such a head is a small decoder over entries. Entry i of a text joins the guide of token i, which is
what the head makes of the target's states there, with token i + 1, and says something about token
i + 2. Behind the text, where the target has not been, the head's own output takes the place of the
guide. Each entry attends over those before it, so that keys and values of a text are kept.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outpace.heads.base import Head, Shared


@dataclass(frozen=True, eq=False)
class Entries:
    """Keys and values of L entries of B rows."""

    keys: Tensor  # [B, G, L, D], of G groups of attention heads
    values: Tensor  # [B, G, L, D]

    def __len__(self) -> int:
        return self.keys.shape[2]

    def then(self, more: Entries) -> Entries:
        """Returns these and further ones."""
        return Entries(
            torch.cat([self.keys, more.keys], 2), torch.cat([self.values, more.values], 2)
        )

    @classmethod
    def of_layers(cls, layers: Sequence[Entries]) -> Entries:
        """Returns the entries of several layers side by side, as if they were groups of one."""
        return cls(
            torch.cat([each.keys for each in layers], 1),
            torch.cat([each.values for each in layers], 1),
        )

    def by_layer(self, layers: int) -> list[Entries]:
        """Returns the entries of each layer, which `of_layers` has put side by side."""
        parts = zip(self.keys.chunk(layers, 1), self.values.chunk(layers, 1), strict=True)
        return [Entries(keys, values) for keys, values in parts]


@dataclass(frozen=True, eq=False)
class Sight:
    """Where W entries of B rows stand, and which ones they attend to."""

    positions: Tensor  # [B, W], their numbers in their texts, from 0
    before: Entries  # L of each row
    visible: Tensor  # [B, W, L + W] bool: of those before and of the W themselves, itself at least

    @classmethod
    def of_texts(cls, begin: Entries, count: int) -> Sight:
        """Returns the sight of ``count`` entries of each text, for texts that are read at once: an
        entry sees the earlier ones and itself. begin: no entries, of as many rows."""
        rows, device = len(begin.keys), begin.keys.device
        at = torch.arange(count, device=device)
        return cls(at.expand(rows, -1), begin, (at <= at[:, None]).expand(rows, -1, -1))


class AttendingHead(Head):
    """Guesses from all of a text, and the tokens drafted behind it."""

    recipe: ClassVar[str] = "attending"

    @abstractmethod
    def guide(self, states: Tensor) -> Tensor:
        """Returns the guides ``[..., H]`` for states ``[..., len(layers) H]`` of the target."""

    @abstractmethod
    def begin(self, rows: int) -> Entries:
        """Returns no entries of n rows."""

    @abstractmethod
    def step(
        self, guides: Tensor, tokens: Tensor, sight: Sight, shared: Shared
    ) -> tuple[Tensor, Entries]:
        """Returns the outputs ``[B, W, H]`` of W entries, and the entries themselves.

        guides: ``[B, W, H]``, or outputs of earlier steps in their place. tokens: ``[B, W]``, the
        target's tokens behind them.
        """

    @abstractmethod
    def logits(self, outputs: Tensor, shared: Shared) -> Tensor:
        """Returns the logits ``[..., V']`` of the next tokens for outputs ``[..., H]``."""
