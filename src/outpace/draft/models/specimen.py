"""A fair draft model for any target: the target itself with noise on its weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from outpace.targets.cpu.weights.blocks import block_bytes

NOISE = 0.3
"""Standard deviation of the noise, in those of the weights: a good part of such a model's drafts is
accepted, and a good part is not."""


def noisy_copy(model: nn.Module, noise: float = NOISE, seed: int = 2) -> Any:
    """Returns a copy with weights off by ``noise`` of their spread; the same one each time.

    Weights in blocks cannot be a little off: the vectors beside them are, by ``noise`` of
    themselves.
    """
    generator = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(model)
    packed = bool(block_bytes(model))
    with torch.no_grad():
        for weight in other.parameters():
            if weight.dim() > 1 or packed:
                error = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
                spread = weight.std() if weight.dim() > 1 else weight
                weight.add_(noise * spread * error.to(weight.device))
    return other
