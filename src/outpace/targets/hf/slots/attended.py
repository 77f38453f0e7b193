"""Masks in the form that an attention function takes."""

from __future__ import annotations

import torch
from torch import Tensor

from outpace.targets.hf.attention import BOOLEAN


def as_attended(seen: Tensor, attn_implementation: str, dtype: torch.dtype) -> Tensor:
    """Returns a mask as an attention function takes it, ``[A, 1, T, S]``.

    seen: ``[A, T, S]`` bool. The result is of booleans, or else of numbers in the model's dtype,
    which are added to the attention scores.
    """
    mask = seen[:, None]
    if attn_implementation in BOOLEAN:
        return mask
    zero = torch.zeros((), dtype=dtype, device=seen.device)
    return torch.where(mask, zero, torch.finfo(dtype).min)
