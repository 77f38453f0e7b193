"""How heads with columns that ride in the target's pass are trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from outpace.core.proposal import AuxTokens
from outpace.heads.base import Shared
from outpace.heads.riders.base import AuxHead
from outpace.train.marks import Marks, Recipe, Sheet, together
from outpace.train.teacher import Lesson

PLACES = 64
"""Places of a block behind which columns ride, at most: each brings ``depths`` columns, and
gradients go through all that the target computes of them."""


class Carrier(Shared, Protocol):
    """A target that lets columns ride in its passes."""

    def carry(self, tokens: Tensor, aux_tokens: AuxTokens) -> Tensor:
        """Returns the logits ``[B, R, V]`` of auxiliary tokens in texts ``[B, T]``, as
        `Teacher.carry`."""


class AuxRecipe(Recipe):
    """Marks a `AuxHead`: copies of its columns ride behind places all over the text at once.

    While it is measured, they ride behind all places but the first, some at a time.
    """

    def __init__(self, head: AuxHead, target: Carrier) -> None:
        self._head, self._target = head, target

    def mark(self, lesson: Lesson) -> Marks:
        count = lesson.tokens.shape[1] - self._head.config.depths
        at = torch.arange(count, device=lesson.tokens.device)
        if torch.is_grad_enabled():
            return self._behind(lesson, at[:: -(-count // PLACES)])
        # Nothing rides before the first round of a text, which is a plain one.
        first = min(1, count - 1)
        drafted = torch.split(at[first:], PLACES)
        marks = together([self._behind(lesson, places) for places in drafted])
        return replace(marks, first=first)

    def _behind(self, lesson: Lesson, places: Tensor) -> Marks:
        """The marks for columns behind these places ``[P]``."""
        depths, (rows, length) = self._head.config.depths, lesson.tokens.shape
        aux_tokens = self._head.aux_tokens(places, length, rows)
        said = self._target.carry(lesson.tokens, aux_tokens)[..., self._head.d2t]
        said = said.view(rows, len(places), depths, -1)  # [B, P, depths, V']
        sheet = Sheet(self._head, lesson, places)
        for depth in range(depths):
            sheet.note(said[:, :, depth])
        return sheet.marks()
