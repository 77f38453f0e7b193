"""How heads that guess from one hidden state of the target are trained."""

from __future__ import annotations

from outpace.heads.base import Shared
from outpace.heads.steps.base import StepHead
from outpace.train.recipe import DepthLosses, LossOutput, Recipe
from outpace.train.teacher import Batch


class StepRecipe(Recipe):
    """The loss of a `StepHead`: each place starts from the target's state there."""

    def __init__(self, head: StepHead, shared: Shared) -> None:
        self._head, self._shared = head, shared

    def compute_loss(self, batch: Batch) -> LossOutput:
        depths = self._head.config.depths
        places = batch.tokens.shape[1] - depths
        losses = DepthLosses(self._head, batch, places)
        memory = self._head.begin_at(batch.states[:, :places].float())
        for depth in range(1, depths + 1):
            logits, memory = self._head.step(memory, losses.path(), depth, self._shared)
            losses.add(logits)
        return losses.output()
