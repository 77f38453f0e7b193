"""How heads that attend over the whole text are trained: the training-time test of EAGLE-3.

A head that learned only from the target's states would be lost after the text, where its own
outputs take their place. So it is unrolled as in a draft: in step d, each place goes on from its
own output of step d - 1.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from outpace.heads.attending.base import AttendingHead, Sight
from outpace.heads.base import Shared
from outpace.train.recipe import DepthLosses, LossOutput, Recipe
from outpace.train.teacher import Batch


class AttendingRecipe(Recipe):
    """The loss of an `AttendingHead`.

    Each place sees what it would see in a draft: the text's entries up to its own, which are those
    of the first step, and of each later step its own entry only.
    """

    def __init__(self, head: AttendingHead, shared: Shared) -> None:
        self._head, self._shared = head, shared

    def compute_loss(self, batch: Batch) -> LossOutput:
        depths = self._head.config.depths
        losses = DepthLosses(self._head, batch, batch.tokens.shape[1] - depths)
        for outputs in self._unrolled(batch.tokens, batch.states.float(), depths):
            losses.add(self._head.logits(outputs, self._shared))
        return losses.output()

    def _unrolled(self, tokens: Tensor, states: Tensor, depths: int) -> Iterator[Tensor]:
        """Yields the outputs ``[B, P, H]`` of the first ``depths`` steps, at all places that have
        text enough after them for the head's depths. tokens: ``[B, T]``; states: ``[B, T, H]``."""
        rows, places = tokens.shape[0], tokens.shape[1] - self._head.config.depths
        at = torch.arange(places, device=tokens.device)
        visible = at <= at[:, None]  # [P, P]
        alone = at == at[:, None]
        outputs = self._head.guide(states[:, :places])
        before = self._head.begin(rows)
        for depth in range(1, depths + 1):
            positions = (at + depth - 1).expand(rows, -1)
            sight = Sight(positions, before, visible.expand(rows, -1, -1))
            fed = tokens[:, depth : depth + places]
            outputs, entries = self._head.step(outputs, fed, sight, self._shared)
            yield outputs
            before = before.then(entries)
            visible = torch.cat([visible, alone], -1)
