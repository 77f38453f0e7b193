"""What heads that are no network of their own, but columns in the target's pass, have in common.

Behind the root and behind each drafted node a few columns ride, which nothing else sees. What the
target says at those behind the node where a round ends are the guesses of the next round. So a
guess costs columns of a pass that is made anyway, and hardly any weights.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from outpace.core.proposal import AuxTokens
from outpace.heads.base import Head


class AuxHead(Head):
    """Guesses by columns of its own in the target's pass, ``config.depths`` behind each node.

    The column of depth d stands d positions behind its node, where the d-th next token will stand,
    and the target says there what comes after it: at the node's own root that is the guess at
    depth d. It has not seen the tokens in between.
    """

    learns_online: ClassVar[bool] = False
    recipe: ClassVar[str] = "riding"

    @property
    def layers(self) -> tuple[int, ...]:
        """None: it reads no states that were there before the pass."""
        return ()

    @property
    def enter(self) -> int:
        """The target's layer at which the columns join."""
        return 0

    @abstractmethod
    def columns(self, states: Tensor) -> Tensor:
        """Returns what the columns join with, ``[B, P, depths, H]``.

        states: ``[B, P, H]``, what the layer is given of the P nodes that they stand behind; of no
        meaning where they join at the first layer.
        """

    def aux_tokens(self, behind: Tensor, first: int, rows: int) -> AuxTokens:
        """Returns the columns behind P nodes, the same in all rows.

        behind: ``[P]``, their numbers (0 is the root). first: the number of the first column.
        """
        places, depths = len(behind), self.config.depths
        number = first + torch.arange(places * depths, device=behind.device).view(places, depths)
        parents = torch.cat([behind[:, None], number[:, :-1]], 1)
        parents = parents.flatten().expand(rows, -1)
        if self.enter:
            return AuxTokens(
                parents,
                enter=self.enter,
                made=lambda states: self.columns(states[:, behind]).flatten(1, 2),
            )
        nowhere = torch.empty(rows, places, 0, device=behind.device)
        return AuxTokens(parents, embeddings=self.columns(nowhere).flatten(1, 2))
