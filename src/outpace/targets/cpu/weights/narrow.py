"""Weights in fewer bytes, converted piece by piece.

A piece stays in the processor's cache while it is converted and checked, so that a weight is read
from memory once and no second copy of it is made on the way.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, split

NARROW = (torch.bfloat16, torch.float16)
"""Dtypes that hold a float32 weight without loss, if it was saved in one of them."""

SAMPLE = 1 << 12
"""Elements of a weight that are looked at before all of them."""

PIECE = 1 << 16
"""Elements of a piece, about."""

SMALLEST_SCALE = 1e-30
"""Divisor of a row of zeros, which would be divided by zero otherwise."""


def narrowed(matrix: Tensor, takes: Callable[[torch.dtype], bool]) -> Tensor:
    """Returns a weight ``[N, K]`` in a narrower dtype that holds each element exactly.

    That is a copy in bfloat16 or float16 of a float32 weight that has no more digits than these,
    and otherwise the weight itself. takes: whether a dtype may be used.
    """
    if matrix.dtype != torch.float32:
        return matrix
    plain = matrix.detach()
    for dtype in filter(takes, NARROW):
        sample = plain.flatten()[:SAMPLE]
        if torch.equal(sample.to(dtype).to(sample.dtype), sample):
            found = _exact(plain, dtype)
            if found is not None:
                return found
    return matrix


def to_int8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a weight ``[N, K]`` as 8-bit integers, and the scale ``[N]`` of each row."""
    integers = torch.empty_like(matrix, dtype=torch.int8)
    scale = matrix.new_empty(matrix.shape[0])
    rows = _rows(matrix)
    pieces = zip(split(matrix, rows), split(integers, rows), split(scale, rows), strict=True)
    for source, target, factor in pieces:
        factor.copy_(source.abs().amax(1).clamp_(min=SMALLEST_SCALE).div_(127))
        target.copy_((source / factor[:, None]).round_())
    return integers, scale


def _exact(matrix: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Returns a copy in another dtype, or None if an element would change."""
    copy = torch.empty_like(matrix, dtype=dtype)
    rows = _rows(matrix)
    for source, target in zip(split(matrix, rows), split(copy, rows), strict=True):
        target.copy_(source)
        if not torch.equal(target.to(source.dtype), source):
            return None
    return copy


def _rows(matrix: Tensor) -> int:
    return max(1, PIECE // max(1, matrix.shape[1]))
