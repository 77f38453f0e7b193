"""Students and their training recipes: a student is a head, a classifier or a small model with all
that a run needs to know of it; its recipe computes the loss and says which guesses are right."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from outpace.core.proposal import AuxTokens
from outpace.heads.base import Head, SharedModules
from outpace.train.metrics import AcceptanceLength, Metric
from outpace.train.teacher import TOP, Teacher, TeacherBatch

DECAY = 0.8
"""The weight of each depth's loss, as a share of the depth above it (Medusa's and EAGLE-3's)."""


@dataclass(frozen=True, eq=False)
class LossOutput:
    """The loss of a head on a batch, and which of its guesses are right."""

    loss: Tensor  # to be minimised
    hits: Tensor
    """``[B, P, D]`` bool, by text, place and depth: whether the head's first guess is the target's.
    While a head is measured, they are those of all places of a text, in their order. While it
    learns, they are those of some places or of none, and mean nothing. A classifier's hits are as
    its `Metric` takes them."""
    first: int = 0
    """The place of the first of the hits; the root of place 0 is the second token."""


def joined(outputs: Sequence[LossOutput]) -> LossOutput:
    """Returns the output at all places of some texts, from those at some places each, in order."""
    hits = torch.cat([each.hits for each in outputs], 1)
    losses = torch.stack([each.loss * each.hits.shape[1] for each in outputs])
    loss: Tensor = losses.sum() / hits.shape[1]
    return LossOutput(loss, hits, outputs[0].first)


class Recipe(ABC):
    """Computes the loss of a head at all places of a text that have enough text after them.

    At each place the head starts as if the next token were the root of a round, and is given the
    text's own tokens as the path. Its guess at each depth is compared with what the target says
    after the same tokens.
    """

    beyond_depths: ClassVar[int] = 1
    """Tokens that a block needs, at least, besides one for each depth."""

    @abstractmethod
    def __init__(self, head: Any, shared: SharedModules) -> None:
        """head: of a kind that it trains (`Head.recipe`)."""

    @abstractmethod
    def compute_loss(self, batch: Any) -> LossOutput:
        """Returns the loss on a batch, which is what `Student.read` makes of a text: a
        `TeacherBatch` for all that draft."""


class AuxTarget(SharedModules, Protocol):
    """A target whose passes take auxiliary tokens."""

    def forward_aux(self, tokens: Tensor, aux_tokens: AuxTokens) -> Tensor:
        """Returns the logits ``[B, R, V]`` of auxiliary tokens in texts ``[B, T]``, as
        `Teacher.forward_aux`."""


class DepthLosses:
    """The loss of a head's guesses, which are added depth by depth, from depth 1 on."""

    def __init__(
        self,
        head: Head,
        batch: TeacherBatch,
        places: int | Tensor,
        decay: float = DECAY,
    ) -> None:
        """places: how many, or these ``[P]``. decay: the weight of each depth's loss, as a share of
        the depth above it."""
        if isinstance(places, int):
            places = torch.arange(places, device=batch.tokens.device)
        self._places = places
        self._batch, self._d2t, self._decay = batch, head.d2t, decay
        self._own = head.target_to_draft()  # [V]
        self._losses: list[Tensor] = []
        self._hits: list[Tensor] = []

    def path(self) -> Tensor:
        """Returns the tokens ``[B, P]`` that the path of each place goes on with: the roots at
        first."""
        return self._batch.tokens[:, self._last()]

    def add(self, logits: Tensor) -> None:
        """Takes the guesses ``[B, P, V']`` after these tokens."""
        here = self._last()
        likeliest, chances = self._batch.top_tokens[:, here], self._batch.top_chances[:, here]
        loss = self._loss(logits, likeliest, chances, self._batch.share(here))
        self._losses.append(self._weight * loss)
        self._hits.append(self._d2t[logits.argmax(-1)] == likeliest[..., 0])

    @torch.no_grad()
    def accepted(self, logits: Tensor) -> Tensor:
        """Returns how likely tokens that are drawn from the guesses ``[B, P, V']`` after these
        tokens are accepted, ``[B, P]``, as far as both know the target's likeliest tokens."""
        here = self._last()
        own = self._own[self._batch.top_tokens[:, here]]  # [B, P, TOP]
        known = torch.where(own >= 0, self._batch.top_chances[:, here], 0.0)
        guessed = logits.float().softmax(-1).gather(-1, own.clamp_min(0))
        return torch.minimum(known, guessed).sum(-1)

    def extra(self, loss: Tensor) -> None:
        """Takes a further loss ``[B, P]`` of the guesses after these tokens."""
        self._losses.append(self._weight * self.mean(loss))

    def mean(self, loss: Tensor) -> Tensor:
        """Returns the mean of a loss ``[B, P]`` of the guesses after these tokens, over the places
        at which there is something to learn."""
        here = self._last()
        learned = self._batch.top_chances[:, here].sum(-1) > 0
        return torch.where(learned, loss, 0.0).mean() / self._batch.share(here)

    @property
    def _weight(self) -> float:
        """The weight of the next guesses' loss."""
        return float(self._decay ** len(self._hits))

    def _last(self) -> Tensor:
        """Returns the places ``[P]`` of the tokens that the next guesses follow."""
        return self._places + (len(self._hits) + 1)

    def output(self) -> LossOutput:
        """Returns the loss of all that was added."""
        return LossOutput(torch.stack(self._losses).sum(), torch.stack(self._hits, -1))

    def _loss(
        self, logits: Tensor, likeliest: Tensor, chances: Tensor, share: Tensor | float
    ) -> Tensor:
        """The cross entropy with the target's distribution, as far as both know its tokens: the
        mean over the places at which there is something to learn."""
        own = self._own[likeliest]  # [B, P, TOP]
        known = torch.where(own >= 0, chances, 0.0)
        found = functional.log_softmax(logits.float(), -1).gather(-1, own.clamp_min(0))
        return -(known * found).sum(-1).mean() / share


class Student(ABC):
    """A network that learns from a target."""

    network: nn.Module
    depths: int
    """Tokens after the root that its loss counts."""
    hidden_layers: tuple[int, ...] = (-1,)
    """The target's layers whose states it is shown."""
    top: int = TOP
    """How many of the target's likeliest tokens it is shown."""

    is_pretrained: bool = False
    """Whether it begins as a drafter that has learned before."""
    drafts: bool = True
    """Whether it foresees the target's tokens; if not, all of a text is the same to it."""
    metric: Metric = AcceptanceLength()
    """The figure by which its checkpoints are compared."""

    def read(self, teacher: Teacher, tokens: Tensor) -> Any:
        """Returns the batch that is to be learned from blocks of text ``[B, T]``."""
        return teacher.read(tokens)

    @abstractmethod
    def recipe(self, teacher: Teacher) -> Recipe:
        """Returns how it is trained, and makes it ready to begin."""

    @abstractmethod
    def save(self, out: Path) -> None:
        """Writes what ``--draft`` takes. Each file is replaced at once."""
