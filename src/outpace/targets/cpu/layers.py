"""The plain linear layers of a model: those that another kind of layer may stand in for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


def linear_layers(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Returns each plain linear layer of a model as its parent and its name there."""
    return [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        # Subclasses and hooked modules do more than a product.
        if type(child) in (nn.Linear, Conv1D) and not any(hooks_of(child))
    ]


def hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    """Returns where a module keeps the hooks around its forward pass: empty unless there are some,
    and the same dictionaries for as long as the module lives."""
    return [module._forward_hooks, module._forward_pre_hooks]


def exchange(model: nn.Module, make: Callable[[Any], nn.Module | None]) -> int:
    """Puts what ``make`` returns in the place of each plain linear layer, unless that is nothing;
    returns how many were exchanged. A layer that stands in two places stays one."""
    made: dict[int, tuple[Any, nn.Module | None]] = {}  # with the layer, so that no id comes twice
    for parent, name in linear_layers(model):
        layer: Any = getattr(parent, name)
        if id(layer) not in made:
            found = make(layer)
            made[id(layer)] = layer, found.train(layer.training) if found is not None else None
        _, found = made[id(layer)]
        if found is not None:
            setattr(parent, name, found)
    return sum(found is not None for _, found in made.values())


def matrix_of(layer: Any) -> Tensor:
    """Returns a layer's weight ``[N, K]``, contiguous."""
    weight: Tensor = layer.weight.detach()
    return weight.t().contiguous() if type(layer) is Conv1D else weight


SMALLEST_SCALE = 1e-30
"""A row of zeros is divided by this instead of by zero."""


def to_int8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a weight ``[N, K]`` rounded to 8-bit integers, and the scale ``[N]`` of each row."""
    scale = matrix.abs().amax(1).clamp(min=SMALLEST_SCALE) / 127
    return (matrix / scale[:, None]).round().to(torch.int8), scale
