"""Losses over distributions that are too large to be held for all places at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Piece = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes the learner's own states at P places and the target's, both ``[P, H]``; returns the sum of
the losses there, and ``[P]`` whatever is wanted of each place."""


def in_pieces(
    piece: Piece, own: Tensor, theirs: Tensor, size: int, weights: Sequence[nn.Parameter]
) -> tuple[Tensor, Tensor]:
    """Returns the sum of the losses over all pieces of n places, and what is said of each
    place, side by side.

    Each piece is derived as soon as it is made, so that no distribution is kept and none is made
    twice: what checkpointing would do on the way back. weights: those that a piece uses and that
    learn.
    """
    if not torch.is_grad_enabled():
        pairs = zip(torch.split(own, size), torch.split(theirs, size), strict=True)
        made = [piece(*pair) for pair in pairs]
        return torch.stack([loss for loss, _ in made]).sum(), torch.cat([said for _, said in made])
    apply: Any = _Pieces.apply  # untyped
    found: tuple[Tensor, Tensor] = apply(piece, size, own, theirs, *weights)
    return found


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, piece: Piece, size: int, own: Tensor, theirs: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        slopes = [torch.zeros_like(weight) for weight in weights]
        total, said, back = own.new_zeros(()), [], []
        for mine, target in zip(torch.split(own, size), torch.split(theirs, size), strict=True):
            with torch.enable_grad():
                begin = mine.detach().requires_grad_(True)
                loss, each = piece(begin, target)
            first, *others = torch.autograd.grad(loss, [begin, *weights], materialize_grads=True)
            back.append(first)
            for slope, more in zip(slopes, others, strict=True):
                slope.add_(more)
            total = total + loss.detach()
            said.append(each)
        ctx.save_for_backward(torch.cat(back), *slopes)
        marks = torch.cat(said)
        ctx.mark_non_differentiable(marks)
        return total, marks

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        by = slopes[0]
        own, *weights = ctx.saved_tensors
        return (None, None, own * by, None, *(weight * by for weight in weights))
