"""How a decoder whose first layers draft by themselves, too, is trained: sorted fine-tuning.

Kavehzadeh et al. 2024, arXiv 2407.01955, section 3.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outpace.heads.attending.base import Sight
from outpace.heads.attending.s2d import S2d
from outpace.heads.base import Shared
from outpace.train.recipe import DepthLosses, LossOutput, Recipe
from outpace.train.teacher import Batch


class S2dRecipe(Recipe):
    """The loss of an `S2d`. While it learns, all parts count alike; while it is measured, each
    token has the part that is sure of it, as in a draft.

    It reads nothing but tokens, so that its guess after a token is the same at every depth.
    """

    def __init__(self, head: S2d, shared: Shared) -> None:
        self._head, self._shared = head, shared

    def compute_loss(self, batch: Batch) -> LossOutput:
        tokens = batch.tokens[:, 1:]  # the first token of a text is no entry
        count = tokens.shape[1]
        learning = torch.is_grad_enabled()
        outputs = []
        for each in self._head.parts(tokens) if learning else [self._drafted(tokens)]:
            losses = DepthLosses(self._head, batch, count)
            losses.add(self._head.logits(each, self._shared))
            outputs.append(losses.output())
        hits = outputs[-1].hits[..., 0].unfold(1, self._head.config.depths, 1)
        return LossOutput(torch.stack([each.loss for each in outputs]).mean(), hits)

    def _drafted(self, tokens: Tensor) -> Tensor:
        """What the drafter makes of texts ``[B, T]``."""
        rows, count = tokens.shape
        guides = tokens.new_empty(rows, count, 0, dtype=self._head.dtype)
        sight = Sight.of_texts(self._head.begin(rows), count)
        outputs, _ = self._head.step(guides, tokens, sight, self._shared)
        return outputs
