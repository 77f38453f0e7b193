"""How a diffusion drafter is trained: on blocks that it has settled a part of itself."""

from __future__ import annotations

import torch
from torch import Tensor

from outpace.heads.base import Shared
from outpace.heads.blocks.diffusion import Diffusion
from outpace.train.recipe import DepthLosses, LossOutput, Recipe, joined
from outpace.train.teacher import Batch

PLACES = 64
"""Places of a text after which a block is made, at most: each reads a context of its own."""


class DiffusionRecipe(Recipe):
    """The loss of a `Diffusion` drafter.

    Diffusion models learn with tokens that are masked at random. This one learns with the masks
    that it meets in a draft: none of the tokens is settled at first, and then its surest ones are.
    """

    def __init__(self, head: Diffusion, shared: Shared) -> None:
        """shared: what other heads are given of the target; this one needs nothing."""
        self._head = head

    def compute_loss(self, batch: Batch) -> LossOutput:
        count = batch.tokens.shape[1] - self._head.config.depths
        at = torch.arange(count, device=batch.tokens.device)
        if torch.is_grad_enabled():
            return self._after(batch, at[:: -(-count // PLACES)])
        return joined([self._after(batch, places) for places in torch.split(at, PLACES)])

    def _after(self, batch: Batch, places: Tensor) -> LossOutput:
        """The loss of blocks after these places ``[P]``."""
        head, rows = self._head, len(batch.tokens)
        depths = head.config.depths
        windows = torch.cat([head.window(batch.tokens[:, : 2 + at]) for at in places.tolist()])
        losses, hits = [], torch.empty(0)
        for made in head.denoise(windows):
            logits = made.logits.view(len(places), rows, depths, -1).transpose(0, 1)
            guesses = DepthLosses(head, batch, places)
            for depth in range(depths):
                guesses.add(logits[:, :, depth])
            output = guesses.output()
            losses.append(output.loss)
            hits = output.hits
        return LossOutput(torch.stack(losses).mean(), hits)
