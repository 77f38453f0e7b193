"""How a diffusion drafter is trained: on blocks that it has settled a part of itself."""

from __future__ import annotations

import torch
from torch import Tensor

from outpace.heads.base import Shared
from outpace.heads.blocks.diffusion import Diffusion
from outpace.train.marks import Marks, Recipe, Sheet, together
from outpace.train.teacher import Lesson

PLACES = 64
"""Places of a text behind which a block is made, at most: each reads a context of its own."""


class DiffusionRecipe(Recipe):
    """Marks a `Diffusion` drafter.

    Diffusion models learn with tokens that are masked at random. This one learns with the masks
    that it meets in a draft: none of the tokens is settled at first, and then its surest ones are.
    """

    def __init__(self, head: Diffusion, shared: Shared) -> None:
        """shared: what other heads are given of the target; this one needs nothing."""
        self._head = head

    def mark(self, lesson: Lesson) -> Marks:
        count = lesson.tokens.shape[1] - self._head.config.depths
        at = torch.arange(count, device=lesson.tokens.device)
        if torch.is_grad_enabled():
            return self._behind(lesson, at[:: -(-count // PLACES)])
        return together([self._behind(lesson, places) for places in torch.split(at, PLACES)])

    def _behind(self, lesson: Lesson, places: Tensor) -> Marks:
        """The marks for blocks behind these places ``[P]``."""
        head, rows = self._head, len(lesson.tokens)
        depths = head.config.depths
        windows = torch.cat([head.window(lesson.tokens[:, : 2 + at]) for at in places.tolist()])
        losses, hits = [], torch.empty(0)
        for made in head.denoise(windows):
            logits = made.logits.view(len(places), rows, depths, -1).transpose(0, 1)
            sheet = Sheet(head, lesson, places)
            for depth in range(depths):
                sheet.note(logits[:, :, depth])
            marks = sheet.marks()
            losses.append(marks.loss)
            hits = marks.hits
        return Marks(torch.stack(losses).mean(), hits)
