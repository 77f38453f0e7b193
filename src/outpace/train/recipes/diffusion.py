"""How a diffusion drafter is trained: on blocks that it has settled a part of itself."""

from __future__ import annotations

import torch

from outpace.heads.base import Shared
from outpace.heads.blocks.diffusion import Diffusion
from outpace.train.marks import Marks, Recipe, Sheet
from outpace.train.teacher import Lesson

PLACES = 64
"""Places of a text behind which a block is made, at most: each reads a context of its own."""


class DiffusionRecipe(Recipe):
    """Marks a `Diffusion` drafter.

    Which tokens are masked when it learns is not drawn at random, as diffusion models learn it, but
    what it meets in a draft: none is settled at first, and then those that it is surest of.
    """

    def __init__(self, head: Diffusion, shared: Shared) -> None:
        """shared: what other heads are given of the target; this one needs nothing."""
        self._head = head

    def mark(self, lesson: Lesson) -> Marks:
        head, (rows, length) = self._head, lesson.tokens.shape
        depths = head.config.depths
        spacing = -(-(length - depths) // PLACES)
        places = torch.arange(0, length - depths, spacing, device=lesson.tokens.device)
        windows = torch.cat([head.window(lesson.tokens[:, : 2 + at]) for at in places.tolist()])
        losses, hits = [], torch.empty(0)
        for made in head.denoise(windows):
            logits = made.logits.view(len(places), rows, depths, -1).transpose(0, 1)
            sheet = Sheet(head, lesson, len(places), spacing)
            for depth in range(depths):
                sheet.note(logits[:, :, depth])
            marks = sheet.marks()
            losses.append(marks.loss)
            hits = marks.hits
        return Marks(torch.stack(losses).mean(), hits)
