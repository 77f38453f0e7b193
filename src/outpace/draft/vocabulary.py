"""The map between a drafter's tokens and the target's.

A draft head may know only the most frequent of the target's tokens (EAGLE-3's ``d2t``), and a
draft model's head may be padded to another width. What a drafter cannot say has probability 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

NEVER = float("-inf")


class Vocabulary:
    """Which token of the target each of a drafter's own tokens is.

    >>> some = Vocabulary(torch.tensor([4, 1]), size=5)
    >>> some.to_target(torch.tensor([0, 1])).tolist(), some.to_own(torch.tensor([4, 3])).tolist()
    ([4, 1], [0, -1])
    >>> some.logits(torch.tensor([2.0, 3.0])).tolist()
    [-inf, 3.0, -inf, -inf, 2.0]
    """

    def __init__(self, target_ids: Tensor, size: int) -> None:
        """target_ids: ``[V']``, each at most once; size: tokens of the target, V."""
        if len(set(target_ids.tolist())) != len(target_ids) or not bool((target_ids < size).all()):
            raise ValueError("each token of a drafter has to be another one of the target")
        self.size = size
        self._target_ids = target_ids
        self._own = target_ids.new_full((size,), -1)
        self._own[target_ids] = torch.arange(len(target_ids), device=target_ids.device)
        self._same = torch.equal(target_ids, torch.arange(len(target_ids)).to(target_ids))

    @classmethod
    def shared(cls, own: int, size: int, device: torch.device | str = "cpu") -> Vocabulary:
        """Returns the map for a drafter with the target's tokens and a head of its own width."""
        return cls(torch.arange(min(own, size), device=device), size)

    def to_target(self, tokens: Tensor) -> Tensor:
        """Returns the target's tokens for the drafter's own, of any shape."""
        return self._target_ids[tokens]

    def to_own(self, tokens: Tensor) -> Tensor:
        """Returns the drafter's own tokens for the target's, of any shape; -1 where it has none."""
        return self._own[tokens]

    def logits(self, own: Tensor) -> Tensor:
        """Returns logits ``[..., V]`` over the target's tokens from logits ``[..., V']`` over the
        drafter's own (further ones are padding); -inf where it has none."""
        known = len(self._target_ids)
        if self._same:
            missing = self.size - known
            cut = own[..., :known]
            return torch.nn.functional.pad(cut, (0, missing), value=NEVER) if missing else cut
        found = own.new_full((*own.shape[:-1], self.size), NEVER)
        found[..., self._target_ids] = own[..., :known]
        return found
