"""How heads with columns that ride in the target's pass are trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from outpace.core.proposal import AuxTokens
from outpace.heads.base import Shared
from outpace.heads.riders.base import AuxHead
from outpace.train.recipe import DepthLosses, LossOutput, Recipe, joined
from outpace.train.teacher import Batch

PLACES = 64
"""Places of a block after which columns ride, at most: each brings ``depths`` columns, and
gradients go through all that the target computes of them."""


class Carrier(Shared, Protocol):
    """A target that lets columns ride in its passes."""

    def carry(self, tokens: Tensor, aux_tokens: AuxTokens) -> Tensor:
        """Returns the logits ``[B, R, V]`` of auxiliary tokens in texts ``[B, T]``, as
        `Teacher.carry`."""


class AuxRecipe(Recipe):
    """The loss of a `AuxHead`: copies of its columns ride after places all over the text.

    While it is measured, they ride after all places but the first, some at a time.
    """

    def __init__(self, head: AuxHead, target: Carrier) -> None:
        self._head, self._target = head, target

    def compute_loss(self, batch: Batch) -> LossOutput:
        count = batch.tokens.shape[1] - self._head.config.depths
        at = torch.arange(count, device=batch.tokens.device)
        if torch.is_grad_enabled():
            return self._after(batch, at[:: -(-count // PLACES)])
        # Nothing rides before the first round of a text, which is a plain one.
        first = min(1, count - 1)
        drafted = torch.split(at[first:], PLACES)
        output = joined([self._after(batch, places) for places in drafted])
        return replace(output, first=first)

    def _after(self, batch: Batch, places: Tensor) -> LossOutput:
        """The loss of columns after these places ``[P]``."""
        depths, (rows, length) = self._head.config.depths, batch.tokens.shape
        aux_tokens = self._head.aux_tokens(places, length, rows)
        said = self._target.carry(batch.tokens, aux_tokens)[..., self._head.d2t]
        said = said.view(rows, len(places), depths, -1)  # [B, P, depths, V']
        losses = DepthLosses(self._head, batch, places)
        for depth in range(depths):
            losses.add(said[:, :, depth])
        return losses.output()
