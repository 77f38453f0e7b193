"""How heads that guess a whole block at once are trained: on blocks behind many places of a text.

Chen et al. 2026, arXiv 2602.06036, section 4.2.
"""

from __future__ import annotations

import math

import torch

from outpace.heads.base import Shared
from outpace.heads.blocks.base import BlockHead
from outpace.train.marks import Marks, Recipe, Sheet, together
from outpace.train.teacher import Lesson

BLOCKS = 32
"""Blocks of a text that are looked at together: their logits take memory."""


class BlockRecipe(Recipe):
    """Marks a `BlockHead`.

    While it learns, blocks begin at random places of a text; while it is measured, at all of them.
    A wrong token makes those behind it worthless, so that the first ones weigh most: each
    ``exp(-1 / g)`` of the one before, with g half of a block, and 7 at most.
    """

    def __init__(self, head: BlockHead, shared: Shared) -> None:
        self._head, self._shared = head, shared
        wide = head.config.depths + 1
        self._decay = math.exp(-1 / min(wide / 2, 7))

    def mark(self, lesson: Lesson) -> Marks:
        rows, length = lesson.tokens.shape
        device = lesson.tokens.device
        at = torch.arange(length, device=device)
        before = self._head.entries(lesson.states.float(), at.expand(rows, -1))
        count = length - self._head.config.depths
        if torch.is_grad_enabled():
            chosen = [torch.randperm(count)[:BLOCKS].to(device)]
        else:
            chosen = list(torch.split(torch.arange(count, device=device), BLOCKS))
        marks = []
        for places in chosen:
            visible = (at <= places[:, None]).expand(rows, -1, -1)  # [B, P, T]
            sheet = Sheet(self._head, lesson, places, decay=self._decay)
            roots = sheet.path()
            positions = (places + 1).expand(rows, -1)
            logits = self._head.block(roots, positions, before, visible, self._shared)
            for depth in range(logits.shape[2]):
                sheet.note(logits[:, :, depth])
            marks.append(sheet.marks())
        return together(marks)
