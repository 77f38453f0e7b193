"""Tokens whose logits a pass computes beside those of the first ones of a vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.core.logits.truncation import NEVER
from outpace.targets.cpu.native import Part, Weight, part
from outpace.targets.cpu.native_layers.product import NativeProduct


@dataclass(frozen=True)
class OtherTokens:
    """A copy of what a head has for some tokens, as a small head of its own."""

    tokens: tuple[int, ...]
    pointer: int
    """To the weight that theirs was copied from."""
    weight: Weight
    """Alive as long as `part` may be read."""
    part: Part
    at: Tensor
    """The tokens."""
    where: Tensor
    """Where they are among the outputs of `part`."""
    size: int
    """Tokens of the vocabulary, V."""

    @classmethod
    def of(cls, tokens: tuple[int, ...], head: NativeProduct) -> OtherTokens:
        """Copies what a head has for these tokens."""
        weight, where = head.some(tokens)
        return cls(
            tokens=tokens,
            pointer=head.read.data_ptr(),
            weight=weight,
            part=part(weight),
            at=torch.tensor(tokens),
            where=torch.tensor(where),
            size=head.out_features,
        )

    def are(self, tokens: tuple[int, ...], head: NativeProduct) -> bool:
        """Whether they are these tokens of this head."""
        return self.tokens == tokens and self.pointer == head.read.data_ptr()

    def spread(self, found: Tensor, first: int) -> Tensor:
        """Returns logits ``[A, keep, V]`` from those of the first tokens and of these, ``[A, keep,
        first + outputs of the part]``; all others are -inf."""
        logits = found.new_full((*found.shape[:-1], self.size), NEVER)
        logits[..., :first] = found[..., :first]
        logits[..., self.at] = found[..., first:][..., self.where]
        return logits


def side_by_side(logits: Tensor, first: int) -> None:
    """Puts what two heads wrote one after the other, ``[A, keep, first]`` and ``[A, keep, rest]``,
    side by side, in place: ``[A, keep, first + rest]``."""
    rows, keep, both = logits.shape
    if rows * keep == 1:
        return
    flat, border = logits.view(-1).clone(), rows * keep * first
    logits[..., :first] = flat[:border].view(rows, keep, first)
    logits[..., first:] = flat[border:].view(rows, keep, both - first)
