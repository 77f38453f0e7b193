"""A fair draft model for any target: the target itself with noise on its weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

NOISE = 0.3
"""Standard deviation of the noise, in those of the weights: a good part of such a model's drafts is
accepted, and a good part is not."""


LARGEST_CODE = 127
"""The largest weight of 8 bits."""


def noisy_copy(model: nn.Module, noise: float = NOISE, seed: int = 2) -> Any:
    """Returns a copy with weights off by ``noise`` of their spread; the same one each time.

    Integers are off by whole steps. Where weights are held in a form that cannot be a little off
    (blocks, those that a library has packed), the vectors next to them are, by ``noise`` of
    themselves.
    """
    generator = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(model)
    packed = any(map(_holds_packed, other.modules()))
    with torch.no_grad():
        for weight in other.parameters():
            if not _is_packed(weight) and (weight.dim() > 1 or packed):
                _disturb(weight, noise, generator)
    return other


def _holds_packed(module: nn.Module) -> bool:
    own = any(map(_is_packed, module.parameters(recurse=False)))
    return own or hasattr(module, "packed_bytes")


def _is_packed(weight: Tensor) -> bool:
    """Whether a weight is a tensor of a class of its own, as torchao's are."""
    return is_traceable_wrapper_subclass(weight)


def _disturb(weight: Tensor, noise: float, generator: torch.Generator) -> None:
    exact = weight if weight.is_floating_point() else weight.float()
    error = torch.randn(weight.shape, generator=generator, dtype=exact.dtype).to(weight.device)
    spread = exact.std() if weight.dim() > 1 else exact
    if weight.is_floating_point():
        weight.add_(noise * spread * error)
    else:
        codes = (exact + noise * spread * error).round_()
        weight.copy_(codes.clamp_(-LARGEST_CODE, LARGEST_CODE))
