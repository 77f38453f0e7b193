"""How heads that guess depth by depth are trained: all places of a text at once.

At each place the head starts from the target's state there, as if the next token were the root of
a round, and is given the text's own tokens as the path. Its guess at each depth is compared with
what the target says after the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from outpace.heads.base import Shared, StepHead
from outpace.train.teacher import Lesson

DECAY = 0.8
"""The weight of each depth's loss, as a share of the depth above it (Medusa's and EAGLE-3's)."""


@dataclass(frozen=True, eq=False)
class Marks:
    """How a head does on a lesson."""

    loss: Tensor  # to be minimised
    hits: Tensor  # [P, D] bool: whether its first guess is the target's, by place and depth

    @property
    def acceptance_length(self) -> float:
        """Tokens per pass of the target that chains of greedy guesses would bring."""
        return 1 + float(self.hits.cumprod(-1).float().sum(-1).mean())


class StepRecipe:
    """Marks a `StepHead` on lessons."""

    def __init__(self, head: StepHead, shared: Shared) -> None:
        self._head, self._shared = head, shared
        own = head.d2t.new_full((head.target.vocab_size,), -1)
        own[head.d2t] = torch.arange(head.vocabulary, device=own.device)
        self._own = own  # [V]: the head's own number of each token, or -1

    def mark(self, lesson: Lesson) -> Marks:
        """Returns the marks for all places of a lesson that have enough text behind them."""
        depths = self._head.config.depths
        places = lesson.tokens.shape[1] - depths
        memory = lesson.states[:, :places].float()
        losses, hits = [], []
        for depth in range(1, depths + 1):
            path = lesson.tokens[:, depth : depth + places]  # at depth 1 the root
            logits, memory = self._head.step(memory, path, depth, self._shared)
            here = slice(depth, depth + places)
            likeliest, chances = lesson.top_tokens[:, here], lesson.top_chances[:, here]
            losses.append(DECAY ** (depth - 1) * self._loss(logits, likeliest, chances))
            guess = self._head.d2t[logits.argmax(-1)]
            hits.append(guess == likeliest[..., 0])
        return Marks(torch.stack(losses).sum(), torch.stack(hits, -1).flatten(0, 1))

    def _loss(self, logits: Tensor, likeliest: Tensor, chances: Tensor) -> Tensor:
        """The cross entropy with the target's law, as far as both know its tokens."""
        own = self._own[likeliest]  # [B, P, TOP]
        known = torch.where(own >= 0, chances, 0.0)
        found = functional.log_softmax(logits.float(), -1).gather(-1, own.clamp_min(0))
        return -(known * found).sum(-1).mean()
