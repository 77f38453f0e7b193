"""Mixtures of experts: whether a model is one, and what computes its experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

GROUPED = "grouped_mm"
"""transformers' usual way to compute experts, in one product of torch that takes no float64."""


def has_experts(entries: Mapping[str, Any]) -> bool:
    """Returns whether a configuration, or a part of it, counts experts: each family has its own
    name for their number, which ends with this word.

    >>> has_experts({"text_config": {"num_local_experts": 8}})
    True
    """
    for name, value in entries.items():
        if isinstance(value, Mapping) and has_experts(value):
            return True
        if str(name).endswith("experts") and type(value) is int and value > 1:
            return True
    return False


def lack_float64(model: nn.Module) -> bool:
    """Returns whether a model's weights are in float64, and what computes its experts does not take
    them."""
    loaded: Any = model
    implementation = getattr(loaded.config.get_text_config(), "_experts_implementation", None)
    wide: bool = loaded.dtype == torch.float64
    return wide and implementation == GROUPED and has_experts(loaded.config.to_dict())


def compute_in_float64(model: nn.Module) -> None:
    """Makes a model with weights in float64 compute its experts one by one, as any dtype can be."""
    if lack_float64(model):
        loaded: Any = model
        loaded.set_experts_implementation("eager")
