"""Float weights rounded to blocks of 4 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from outpace.targets.cpu.weights.blocks import Blocks

BLOCK = 32
"""Weights that share a scale and a smallest value."""

LEVELS = 15
"""The largest code."""

SHRUNK = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Shares of a block's range that are tried: a smaller one cuts off its ends and is finer inside."""

PIECE = 1 << 18
"""Weights that are rounded at once, so that what they need stays in the processor's cache."""


@torch.no_grad()
def to_four_bits(matrix: Tensor) -> Blocks:
    """Returns a float matrix ``[N, K]`` as blocks of the kind Q4_1, its rows filled up with zeros.

    A weight is a code from 0 to 15 times the scale of its block, plus the block's smallest value,
    both float16. Of several ranges the one with the smallest square error is taken, each after one
    step of least squares.
    """
    rows = max(1, PIECE // max(1, matrix.shape[1]))
    pieces = [_rounded(piece) for piece in torch.split(matrix.detach().float(), rows)]
    return Blocks("Q4_1", torch.cat(pieces))


def _rounded(rows: Tensor) -> Tensor:
    """Returns the bytes of rows ``[R, K]``: uint8 ``[R, bytes of a row]``."""
    filled = torch.nn.functional.pad(rows, (0, -rows.shape[1] % BLOCK))
    weights = filled.view(len(rows), -1, BLOCK)  # [R, B, 32]
    low, high = weights.amin(-1, keepdim=True), weights.amax(-1, keepdim=True)
    best: tuple[Tensor, ...] | None = None  # error, codes, scale, smallest
    for share in SHRUNK:
        found = _tried(weights, (low + high) / 2, (high - low) * share)
        if best is None:
            best = found
        else:
            better = found[0] < best[0]
            best = tuple(torch.where(better, *pair) for pair in zip(found, best, strict=True))
    assert best is not None
    _, codes, scale, smallest = best
    small = codes.to(torch.uint8)
    packed = small[..., : BLOCK // 2] | small[..., BLOCK // 2 :] << 4
    numbers = torch.cat([scale, smallest], -1).half().view(torch.uint8)
    return torch.cat([numbers, packed], -1).reshape(len(rows), -1)


def _tried(weights: Tensor, middle: Tensor, width: Tensor) -> tuple[Tensor, ...]:
    """Returns the square error of blocks ``[R, B, 32]`` rounded within a range, the codes, the
    scales and the smallest values."""
    scale = (width / LEVELS).clamp_min(1e-7)
    codes = _codes(weights, scale, middle - width / 2)
    # The scale and the smallest value that suit these codes best.
    mean, mean_code = weights.mean(-1, keepdim=True), codes.mean(-1, keepdim=True)
    spread = (codes - mean_code).square().sum(-1, keepdim=True)
    slope = ((codes - mean_code) * (weights - mean)).sum(-1, keepdim=True) / spread.clamp_min(1e-6)
    scale = torch.where(spread > 0, slope, scale).half().float()
    smallest = (mean - scale * mean_code).half().float()
    codes = _codes(weights, scale, smallest)
    error = (codes * scale + smallest - weights).square().sum(-1, keepdim=True)
    return error, codes, scale, smallest


def _codes(weights: Tensor, scale: Tensor, smallest: Tensor) -> Tensor:
    return ((weights - smallest) / scale.clamp_min(1e-7)).round_().clamp_(0, LEVELS)
