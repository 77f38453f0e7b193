"""How a CTC head is trained: whatever frames spell the text are right."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from outpace.heads.base import Shared
from outpace.heads.steps.ctc import Ctc
from outpace.heads.steps.spelling import TOP_K, beginnings, frames_of, spelt
from outpace.train.recipe import LossOutput, Recipe
from outpace.train.teacher import Batch


class CtcRecipe(Recipe):
    """The loss of a `Ctc` head by how likely its frames spell the text after each place.

    Its drafts are simulated as trees of ``depths`` nodes: the likeliest beginnings of all that the
    frames spell. A depth is hit where one of them is what the target says, up to that depth.
    """

    beyond_depths: ClassVar[int] = 2  # the text after a root begins one token after it

    def __init__(self, head: Ctc, shared: Shared) -> None:
        self._head, self._shared = head, shared

    def compute_loss(self, batch: Batch) -> LossOutput:
        head, tokens = self._head, batch.tokens
        depths, rows = head.config.depths, len(tokens)
        places = tokens.shape[1] - depths - 1
        states = head.begin_at(batch.states[:, :places].to(head.dtype))
        logits = head.guess(states, tokens[:, 1 : 1 + places], self._shared).float().flatten(0, 1)
        # [B P, depths]: the text after the roots, and what the target says there.
        text = tokens[:, 2:].unfold(1, depths, 1)[:, :places].flatten(0, 1)
        likeliest = batch.top_tokens[:, 1:-1, 0].unfold(1, depths, 1)[:, :places].flatten(0, 1)
        own, roots = head.own_tokens()[text], slice(1, 1 + places)
        if batch.learned is None:
            losses = self._losses(logits, own)
        else:
            learned = batch.learned[:, roots].flatten()
            losses = self._losses(logits[learned], own[learned])
        loss = losses.sum() / batch.count(roots)
        if torch.is_grad_enabled():
            return LossOutput(loss, tokens.new_empty(rows, places, 0, dtype=torch.bool))
        return LossOutput(loss, self._hits(logits, likeliest).view(rows, places, depths))

    def _hits(self, logits: Tensor, likeliest: Tensor) -> Tensor:
        """``[N, depths]``; logits: of frames ``[N, F, V' + 1]``; likeliest: what the target says,
        ``[N, depths]``."""
        head = self._head
        frames = frames_of(logits, head.d2t, min(TOP_K, head.vocabulary))
        hits = []
        for place, wanted in zip(frames, likeliest.tolist(), strict=True):
            drafted = beginnings(spelt(place), len(wanted))
            hits.append([tuple(wanted[:end]) in drafted for end in range(1, len(wanted) + 1)])
        return torch.tensor(hits, device=logits.device)

    def _losses(self, logits: Tensor, text: Tensor) -> Tensor:
        """``[N]``, of frames ``[N, F, V' + 1]`` and the tokens ``[N, depths]`` that they should
        spell, up to the first that the head does not know."""
        if not len(text):
            return logits.sum((1, 2))  # torch's own loss takes no empty batch
        known = (text >= 0).cumprod(-1).sum(-1)
        frames = torch.full_like(known, logits.shape[1])
        probs = functional.log_softmax(logits, -1).transpose(0, 1)
        losses: Tensor = functional.ctc_loss(
            probs,
            text.clamp_min(0),
            frames,
            known,
            blank=logits.shape[-1] - 1,
            reduction="none",
            zero_infinity=True,  # repeated tokens want more frames than there are
        )
        return losses
