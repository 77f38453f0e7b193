"""How EAGLE heads are trained: to foresee the target's states, and the distributions that follow
from them.

Li et al. 2024, arXiv 2401.15077, section 4.1 and the published code.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from outpace.heads.attending.eagle import Eagle
from outpace.heads.base import Shared
from outpace.train.recipe import DepthLosses, LossOutput
from outpace.train.recipes.attending import AttendingRecipe
from outpace.train.teacher import Batch

LAWS = 0.1
"""The weight of the cross entropy with the target's distributions; that of the states is 1."""
NOISE = 0.1
"""The largest noise on a state that the head reads, as a share of the states' mean square. With it
the head learns to go on from states that it has foreseen itself, which are a little wrong."""


class EagleRecipe(AttendingRecipe):
    """The loss of an `Eagle`.

    While it learns, it is unrolled over its own outputs as often as it says, in EAGLE once; while
    it is measured, to all of its depths.
    """

    _head: Eagle

    def __init__(self, head: Eagle, shared: Shared) -> None:
        super().__init__(head, shared)

    def compute_loss(self, batch: Batch) -> LossOutput:
        depths, learning = self._head.config.depths, torch.is_grad_enabled()
        states = batch.states.float()
        places = states.shape[1] - depths
        losses = DepthLosses(self._head, batch, places)
        read = _noisy(states) if learning else states
        steps = self._head.unrolled if learning else depths
        far = states.new_zeros(())
        for depth, outputs in enumerate(self._unrolled(batch.tokens, read, steps), 1):
            losses.add(self._head.logits(outputs, self._shared))
            far = far + smooth_l1_loss(outputs, states[:, depth : depth + places]) / steps
        output = losses.output()
        return LossOutput(far + LAWS * output.loss, output.hits)


def _noisy(states: Tensor) -> Tensor:
    """States ``[B, T, H]`` with even noise, which the paper draws from -0.1 to 0.1: its targets'
    states have a mean square of about 1."""
    scale = states.square().mean().sqrt()
    return states + (2 * torch.rand_like(states) - 1) * (NOISE * scale)
