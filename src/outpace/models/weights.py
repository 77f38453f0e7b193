"""What a model's weights take in memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def weight_bytes(model: nn.Module) -> int:
    """Returns the bytes of a model's parameters and of what its layers keep packed.

    Shared ones count once; quantised tensors with all that they consist of.
    """
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    packed = sum(int(getattr(module, "packed_bytes", 0)) for module in model.modules())
    return sum(map(_nbytes, parameters.values())) + packed


def _nbytes(tensor: Tensor) -> int:
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.nbytes
    whole: Any = tensor  # says what it would take unquantised
    return sum(_nbytes(getattr(whole, name)) for name in whole.__tensor_flatten__()[0])
