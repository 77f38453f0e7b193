"""How heads that guess from one hidden state of the target are trained."""

from __future__ import annotations

from outpace.heads.base import Shared
from outpace.heads.steps.base import StepHead
from outpace.train.marks import Marks, Recipe, Sheet
from outpace.train.teacher import Lesson


class StepRecipe(Recipe):
    """Marks a `StepHead`: each place starts from the target's state there."""

    def __init__(self, head: StepHead, shared: Shared) -> None:
        self._head, self._shared = head, shared

    def mark(self, lesson: Lesson) -> Marks:
        depths = self._head.config.depths
        places = lesson.tokens.shape[1] - depths
        sheet = Sheet(self._head, lesson, places)
        memory = self._head.begin_at(lesson.states[:, :places].float())
        for depth in range(1, depths + 1):
            logits, memory = self._head.step(memory, sheet.path(), depth, self._shared)
            sheet.note(logits)
        return sheet.marks()
