"""The map between a drafter's tokens and the target's.

A draft head may know only the most frequent of the target's tokens (EAGLE-3's ``d2t``), a draft
model's head may be padded to another width, and a draft model with another tokenizer shares only
some tokens with the target. What a drafter cannot say has probability 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outpace.core.logits.truncation import NEG_INF


class VocabMapping:
    """Which token of the target each of a drafter's own tokens is.

    >>> some = VocabMapping(torch.tensor([4, 1]), size=5)
    >>> some.to_draft(torch.tensor([4, 3])).tolist()
    [0, -1]
    >>> some.to_target_logits(torch.tensor([2.0, 3.0])).tolist()
    [-inf, 3.0, -inf, -inf, 2.0]
    """

    def __init__(self, target_ids: Tensor, size: int, own_ids: Tensor | None = None) -> None:
        """target_ids: ``[V']``, each at most once; size: tokens of the target, V. own_ids: ``[V']``
        which of the drafter's own tokens these are, each at most once; unset: 0, 1, 2, ..."""
        if len(set(target_ids.tolist())) != len(target_ids) or not bool((target_ids < size).all()):
            raise ValueError("each token of a drafter has to be another one of the target")
        self.size = size
        self._target_ids = target_ids
        self._own_ids = own_ids
        own = torch.arange(len(target_ids)).to(target_ids) if own_ids is None else own_ids
        self._own = target_ids.new_full((size,), -1)
        self._own[target_ids] = own
        self.is_same = own_ids is None and torch.equal(target_ids, own)
        """Whether each token has the same number in both."""

    @classmethod
    def shared(cls, own: int, size: int, device: torch.device | str = "cpu") -> VocabMapping:
        """Returns the map for a drafter with the target's tokens and a head of its own width."""
        return cls(torch.arange(min(own, size), device=device), size)

    @property
    def device(self) -> torch.device:
        """Where tokens are mapped."""
        return self._own.device

    def __len__(self) -> int:
        """How many tokens both know."""
        return len(self._target_ids)

    def to_draft(self, tokens: Tensor) -> Tensor:
        """Returns the drafter's own tokens for the target's, of any shape; -1 where it has none."""
        return self._own[tokens]

    def to_target_logits(self, own: Tensor) -> Tensor:
        """Returns logits ``[..., V]`` over the target's tokens from logits ``[..., V']`` over the
        drafter's own (further ones are padding); -inf where it has none. Where its tokens are the
        target's own (`is_same`), only the first of them need be given."""
        known = len(self._target_ids)
        if self.is_same:
            cut = own[..., :known]
            missing = self.size - cut.shape[-1]
            return torch.nn.functional.pad(cut, (0, missing), value=NEG_INF) if missing else cut
        found = own.new_full((*own.shape[:-1], self.size), NEG_INF)
        spoken = own[..., :known] if self._own_ids is None else own[..., self._own_ids]
        found[..., self._target_ids] = spoken
        return found
