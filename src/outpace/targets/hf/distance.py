"""The distance between logits, its tolerance, and the draft with which models are tried out.

Distances are measured in standard deviations of the plain logits, so that they mean the same for
any model.
"""

from __future__ import annotations

import torch
from torch import Tensor

PREFIX = 6
"""Tokens before the draft, in the longest text."""
PENDING = 2
"""Those of them that are fed together with the draft; the others are cached before."""
TRIAL_PARENTS = (0, 0, 0, 0, 0, 0, 0, 0, 8, 9)
"""A wide tree: the last of many siblings stands far from where its column would put it."""
TRIAL_PATHS = ((1,), (8, 9, 10))
"""The paths whose nodes are compared: the first child, and the longest path."""

COARSE = 0.15
"""How far logits may be off in 16 bits, where a mixture of experts may even send a token to other
experts, and where layers round what they read."""
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}


def tolerance_in(dtype: torch.dtype) -> float:
    """Returns how far logits may be off where the same is computed in another order."""
    return _TOLERANCE.get(dtype, COARSE)


def is_exact(dtype: torch.dtype) -> bool:
    """Returns whether rounding in a dtype is too small to change which tokens are picked."""
    return dtype in _TOLERANCE


def distance(scored: Tensor, expected: Tensor) -> float:
    """Returns how far the logits ``[..., V]`` of some tokens are from the expected ones at most;
    infinitely far where there is a NaN.

    >>> distance(torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 3.0]]))
    0.0
    >>> distance(torch.tensor([[1.0, torch.nan]]), torch.tensor([[1.0, 3.0]]))
    inf
    """
    spread = expected.std(-1).clamp(min=1e-12)
    off = (scored - expected).square().mean(-1).sqrt() / spread
    return float(off.nan_to_num(nan=torch.inf).max())
