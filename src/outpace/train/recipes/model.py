"""How a small model is trained on the target's distributions (DistillSpec, Zhou et al. 2023,
2310.08461)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from outpace.train.losses import find_loss
from outpace.train.marks import Marks, Recipe
from outpace.train.pieces import in_pieces
from outpace.train.readout import Readout
from outpace.train.teacher import AT_ONCE, Lesson, Teacher


class ModelRecipe(Recipe):
    """Marks a model that reads the same text as the target, at every place of it from which there
    is something to learn.

    Distributions are made for n places at once and thrown away: those of a whole batch over a large
    vocabulary would take more memory than both models (`pieces`).
    """

    def __init__(self, model: nn.Module, teacher: Teacher, loss: str, depths: int) -> None:
        """depths: tokens behind the root by which drafts are simulated."""
        self._model: Any = model
        self._teacher, self._depths = teacher, depths
        self._distance = find_loss(loss)
        self._readout = Readout(model, _text_config(model), "the drafter")

    def mark(self, lesson: Lesson) -> Marks:
        output = self._model(
            input_ids=lesson.tokens, use_cache=False, output_hidden_states=True, logits_to_keep=1
        )
        places = torch.ones_like(lesson.tokens, dtype=torch.bool)
        places = places if lesson.learned is None else lesson.learned
        own, theirs = output.hidden_states[-1][places], lesson.states[places]  # [P, H]
        loss, same = in_pieces(self._piece, own, theirs, AT_ONCE, self._readout.learns)
        right = torch.zeros_like(places)
        right[places] = same
        return Marks(loss / lesson.count(), self._drafts(right))

    def _piece(self, own: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sum of the losses at P places, and ``[P]`` at which of them the model's first
        guess is the target's. own, theirs: ``[P, H]``, the last states of model and target."""
        p = self._teacher.logits(theirs)
        q = self._readout(own)[..., : p.shape[-1]].float()
        loss = self._distance(p.log_softmax(-1), q.log_softmax(-1)).sum()
        return loss, p.argmax(-1) == q.argmax(-1)

    def _drafts(self, right: Tensor) -> Tensor:
        """Returns ``[B, T - D, D]``: whether each token of the draft behind each root is right, by
        root and depth. right: ``[B, T]``, whether the guess behind each token is."""
        return right[:, 1:].unfold(1, self._depths, 1)


class LikeliestRecipe(Recipe):
    """Marks a model by the likeliest tokens of the target's distributions, at the places that have
    any: what is kept of texts that were written with the model's drafts."""

    def __init__(self, model: nn.Module, vocabulary: int) -> None:
        """vocabulary: tokens that the model has; the first ones of the target's."""
        self._model: Any = model
        self._vocabulary = vocabulary

    def mark(self, lesson: Lesson) -> Marks:
        own = lesson.top_tokens < self._vocabulary
        chances = torch.where(own, lesson.top_chances, 0.0)
        where = chances.sum(-1) > 0  # [B, T]
        logits = self._model(input_ids=lesson.tokens, use_cache=False).logits[where].float()
        likeliest = lesson.top_tokens[where].clamp_max(self._vocabulary - 1)  # [P, TOP]
        found = logits.log_softmax(-1).gather(-1, likeliest)
        hits = logits.argmax(-1) == likeliest[:, 0]
        return Marks(-(chances[where] * found).sum(-1).mean(), hits[None, :, None])


def _text_config(model: Any) -> Any:
    return model.config.get_text_config()
