"""What a model's weights take in memory, and what a pass reads of them."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from outpace.targets.cpu.weights.blocks import BlockEmbedding


def weight_bytes(model: nn.Module) -> int:
    """Returns the bytes of a model's parameters and of what its layers keep packed.

    Shared ones count once; quantised tensors with all that they consist of.
    """
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    holders: list[Any] = [module for module in model.modules() if hasattr(module, "packed_bytes")]
    # A tied head and its embedding hold the same blocks.
    packed = {id(getattr(each, "blocks", each)): int(each.packed_bytes) for each in holders}
    return sum(map(_nbytes, parameters.values())) + sum(packed.values())


def pass_bytes(model: nn.Module) -> int:
    """Returns the bytes of weights that one pass reads: the same on every machine, whatever kernels
    its layers use there. A table of embeddings is only looked up in.
    """
    return sum(map(_read, model.modules()))


def _read(module: nn.Module) -> int:
    if isinstance(module, (nn.Embedding, BlockEmbedding)):
        return 0
    own = sum(_nbytes(parameter) for parameter in module.parameters(recurse=False))
    loaded = getattr(module, "loaded_bytes", None)  # of a weight that was narrowed since
    narrowed = 0 if loaded is None else int(loaded) - _nbytes(cast(Tensor, module.read))
    return own + narrowed + int(getattr(module, "packed_bytes", 0))


def _nbytes(tensor: Tensor) -> int:
    if hasattr(tensor, "device_mesh"):  # split over processes: those of all of them
        return tensor.numel() * tensor.element_size()
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.nbytes
    whole: Any = tensor  # says what it would take unquantised
    return sum(_nbytes(getattr(whole, name)) for name in whole.__tensor_flatten__()[0])
