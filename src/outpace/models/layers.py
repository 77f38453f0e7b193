"""The plain linear layers of a model: those that another kind of layer may stand in for."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


def linear_layers(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Returns each plain linear layer of a model as its parent and its name there."""
    return [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        # Subclasses and hooked modules do more than a product.
        if type(child) in (nn.Linear, Conv1D)
        and not child._forward_hooks
        and not child._forward_pre_hooks
    ]


def matrix_of(layer: Any) -> Tensor:
    """Returns a layer's weight ``[N, K]``, contiguous."""
    weight: Tensor = layer.weight.detach()
    return weight.t().contiguous() if type(layer) is Conv1D else weight
