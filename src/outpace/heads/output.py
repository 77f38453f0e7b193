"""What heads have in common that guess states of the target, of which its own output matrix makes
logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outpace.heads.base import Head, Shared


class TargetOutput(Head):
    """A head whose logits the target's output matrix makes. A head that knows few tokens only has
    a copy of their rows, ``lm_head``, which has the scale of the logits in it and does not learn.
    """

    lm_head: nn.Linear | None

    def copy_of_rows(self) -> nn.Linear | None:
        """Returns room for the rows of the few tokens that it knows; None where it knows all."""
        few = bool(self.config.draft_vocab_size)
        return nn.Linear(self.target.hidden_size, self.vocabulary, bias=False) if few else None

    @property
    def shares_output(self) -> bool:
        return self.lm_head is None

    def read_out(self, states: Tensor, shared: Shared) -> Tensor:
        """Returns the logits ``[..., V']`` of guessed states ``[..., H]``."""
        return shared.head(states) if self.lm_head is None else shared.bounded(self.lm_head(states))

    @torch.no_grad()
    def begin_from(self, shared_head: Tensor | None) -> None:
        if self.lm_head is not None and shared_head is not None:
            self.lm_head.weight.copy_(shared_head)
            self.lm_head.requires_grad_(False)

    def let_learn(self) -> None:
        super().let_learn()
        if self.lm_head is not None:
            self.lm_head.requires_grad_(False)
