"""How a head does on a lesson."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from outpace.heads.base import Head, Shared
from outpace.train.teacher import Lesson

DECAY = 0.8
"""The weight of each depth's loss, as a share of the depth above it (Medusa's and EAGLE-3's)."""


@dataclass(frozen=True, eq=False)
class Marks:
    """How a head does on a lesson."""

    loss: Tensor  # to be minimised
    hits: Tensor
    """``[B, P, D]`` bool, by text, place and depth: whether the head's first guess is the target's.
    A head that is measured is marked at all places of a text, in their order. While it learns it is
    marked at some of them, or at none, and its hits mean nothing. A classifier's hits are as its
    `Measure` takes them."""
    first: int = 0
    """The place of the first of the hits; the root of place 0 is the second token."""


def together(marks: Sequence[Marks]) -> Marks:
    """Returns the marks of all places of some texts, from those of some places each, in order."""
    hits = torch.cat([each.hits for each in marks], 1)
    losses = torch.stack([each.loss * each.hits.shape[1] for each in marks])
    loss: Tensor = losses.sum() / hits.shape[1]
    return Marks(loss, hits, marks[0].first)


class Recipe(ABC):
    """Marks a head on lessons: at all places of a text that have enough text behind them.

    At each place the head starts as if the next token were the root of a round, and is given the
    text's own tokens as the path. Its guess at each depth is compared with what the target says
    after the same tokens.
    """

    beyond_depths: ClassVar[int] = 1
    """Tokens that a block needs, at least, besides one for each depth."""

    @abstractmethod
    def __init__(self, head: Any, shared: Shared) -> None:
        """head: of the kind that names this recipe (`Head.recipe`)."""

    @abstractmethod
    def mark(self, lesson: Any) -> Marks:
        """Returns the marks for a lesson, which is what `Student.read` makes of a text: a `Lesson`
        for all that draft."""


class Sheet:
    """The marks for a head's guesses, which are noted depth by depth, from depth 1 on."""

    def __init__(
        self,
        head: Head,
        lesson: Lesson,
        places: int | Tensor,
        decay: float = DECAY,
    ) -> None:
        """places: how many, or these ``[P]``. decay: the weight of each depth's loss, as a share of
        the depth above it."""
        if isinstance(places, int):
            places = torch.arange(places, device=lesson.tokens.device)
        self._places = places
        self._lesson, self._d2t, self._decay = lesson, head.d2t, decay
        self._own = head.own_tokens()  # [V]
        self._losses: list[Tensor] = []
        self._hits: list[Tensor] = []

    def path(self) -> Tensor:
        """Returns the tokens ``[B, P]`` that the path of each place goes on with: the roots at
        first."""
        return self._lesson.tokens[:, self._behind()]

    def note(self, logits: Tensor) -> None:
        """Takes the guesses ``[B, P, V']`` behind these tokens."""
        depth = len(self._hits) + 1
        here = self._behind()
        likeliest, chances = self._lesson.top_tokens[:, here], self._lesson.top_chances[:, here]
        loss = self._loss(logits, likeliest, chances, self._lesson.share(here))
        self._losses.append(self._decay ** (depth - 1) * loss)
        self._hits.append(self._d2t[logits.argmax(-1)] == likeliest[..., 0])

    def _behind(self) -> Tensor:
        """Where the tokens are that the next guesses stand behind."""
        return self._places + (len(self._hits) + 1)

    def marks(self) -> Marks:
        """Returns the marks for all that was noted."""
        return Marks(torch.stack(self._losses).sum(), torch.stack(self._hits, -1))

    def _loss(
        self, logits: Tensor, likeliest: Tensor, chances: Tensor, share: Tensor | float
    ) -> Tensor:
        """The cross entropy with the target's distribution, as far as both know its tokens: the
        mean over the places at which there is something to learn."""
        own = self._own[likeliest]  # [B, P, TOP]
        known = torch.where(own >= 0, chances, 0.0)
        found = functional.log_softmax(logits.float(), -1).gather(-1, own.clamp_min(0))
        return -(known * found).sum(-1).mean() / share
