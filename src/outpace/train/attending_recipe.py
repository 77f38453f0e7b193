"""How heads are trained that attend over the whole text: the training-time test of EAGLE-3.

A head that learned only from the target's states would be lost behind the text, where its own
outputs take their place. So it is unrolled as in a draft: in step d, each place goes on from its
own output of step d - 1.
"""

from __future__ import annotations

import torch

from outpace.heads.attending import AttendingHead
from outpace.heads.base import Shared
from outpace.train.marks import Marks, Recipe, Sheet
from outpace.train.teacher import Lesson


class AttendingRecipe(Recipe):
    """Marks an `AttendingHead`.

    Each place sees what it would see in a draft: the text's entries up to its own, which are those
    of the first step, and of each later step its own entry only.
    """

    def __init__(self, head: AttendingHead, shared: Shared) -> None:
        self._head, self._shared = head, shared

    def mark(self, lesson: Lesson) -> Marks:
        depths = self._head.config.depths
        rows, places = lesson.tokens.shape[0], lesson.tokens.shape[1] - depths
        sheet = Sheet(self._head, lesson, places)
        at = torch.arange(places, device=lesson.tokens.device)
        visible = at <= at[:, None]  # [P, P]
        alone = at == at[:, None]
        outputs = self._head.guide(lesson.states[:, :places].float())
        before = self._head.begin(rows)
        for depth in range(1, depths + 1):
            outputs, entries = self._head.step(
                outputs,
                sheet.path(),
                (at + depth - 1).expand(rows, -1),
                before,
                visible.expand(rows, -1, -1),
                self._shared,
            )
            sheet.note(self._head.logits(outputs, self._shared))
            before = before.then(entries)
            visible = torch.cat([visible, alone], -1)
        return sheet.marks()
