"""The bytes of a model's weights: those in memory, and those that a pass reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from outpace.targets.cpu.weights.blocks import BlockEmbedding
from outpace.targets.cpu.weights.experts import BlockExperts, is_experts


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
    """Returns the bytes of weights that a pass over one token reads: the same on every machine,
    whatever kernels its layers use there. A table of embeddings is only looked up in, and of
    experts those are read that the token chooses.
    """
    idle = sum(each.nbytes * (1 - each.chosen) for each in experts_in(model))
    return sum(map(_read, model.modules())) - round(idle)


class Experts(NamedTuple):
    """The experts of a mixture."""

    nbytes: int
    """Bytes of the weights of all of them."""
    chosen: float
    """The share of them that a token chooses."""


def experts_in(model: nn.Module) -> list[Experts]:
    """Returns the mixtures in a model, as far as it is known how many experts a token chooses."""
    found: list[Experts] = []
    for module in model.modules():
        if isinstance(module, BlockExperts) or is_experts(module):
            experts: Any = module
            config = getattr(getattr(experts, "like", experts), "config", None)
            if config is None:  # of Step 3.7's, which keep none
                config = getattr(model, "config", None)
                config = None if config is None else config.get_text_config()
            chosen = getattr(config, "num_experts_per_tok", None) or experts.num_experts
            share = min(1.0, chosen / experts.num_experts)
            found.append(Experts(sum(map(_read, experts.modules())), share))
    return found


def experts_read(experts: Sequence[Experts]) -> tuple[float, float]:
    """Returns the bytes of experts that a token reads in all mixtures, and the share that it
    chooses of one, on an average."""
    read = sum(each.nbytes * each.chosen for each in experts)
    whole = sum(each.nbytes for each in experts)
    return read, read / whole if whole else 0.0


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
