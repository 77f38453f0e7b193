"""How heads that guess a whole block at once are trained: on blocks after many places of a text.

Chen et al. 2026, arXiv 2602.06036, section 4.2.
"""

from __future__ import annotations

import math

import torch

from outpace.heads.base import Shared
from outpace.heads.blocks.base import BlockHead
from outpace.train.recipe import DepthLosses, LossOutput, Recipe, joined
from outpace.train.teacher import Batch

BLOCKS = 32
"""Blocks of a text that are looked at together: their logits take memory."""


class BlockRecipe(Recipe):
    """The loss of a `BlockHead`.

    While it learns, blocks begin at random places of a text; while it is measured, at all of them.
    A wrong token makes those after it worthless, so that the first ones weigh most: each
    ``exp(-1 / g)`` of the one before, with g half of a block, and 7 at most.
    """

    def __init__(self, head: BlockHead, shared: Shared) -> None:
        self._head, self._shared = head, shared
        wide = head.config.depths + 1
        self._decay = math.exp(-1 / min(wide / 2, 7))

    def compute_loss(self, batch: Batch) -> LossOutput:
        rows, length = batch.tokens.shape
        device = batch.tokens.device
        at = torch.arange(length, device=device)
        before = self._head.entries(batch.states.float(), at.expand(rows, -1))
        count = length - self._head.config.depths
        if torch.is_grad_enabled():
            chosen = [torch.randperm(count)[:BLOCKS].to(device)]
        else:
            chosen = list(torch.split(torch.arange(count, device=device), BLOCKS))
        outputs = []
        for places in chosen:
            visible = (at <= places[:, None]).expand(rows, -1, -1)  # [B, P, T]
            losses = DepthLosses(self._head, batch, places, decay=self._decay)
            roots = losses.path()
            positions = (places + 1).expand(rows, -1)
            logits = self._head.block(roots, positions, before, visible, self._shared)
            for depth in range(logits.shape[2]):
                losses.add(logits[:, :, depth])
            outputs.append(losses.output())
        return joined(outputs)
