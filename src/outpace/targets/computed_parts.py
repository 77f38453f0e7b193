"""Which kernels compute which part of a loaded model, and what a pass reads of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from outpace.errors import UnsupportedModel
from outpace.targets.cpu.native_layers.layer import NativeLayer
from outpace.targets.describe import block_kinds, kernels_of
from outpace.targets.hf.loading.loaded import Loaded
from outpace.targets.hf.partial.layers import decoder_layers
from outpace.targets.hf.weights import pass_bytes


@dataclass(frozen=True)
class ComputedPart:
    """A part of a model: the embedding, one kind of part of all decoder layers, the output matrix,
    or what else there is."""

    name: str
    """As the model's code calls it, as "self_attn"; "embedding", "output matrix" or "other"."""
    count: int
    """How many modules it is made of: of a part of decoder layers, in how many it is."""
    kernels: str
    """As `Description.kernels`; "looked up" for an embedding."""
    native_code: int
    """In how many of them our own code computes everything, in passes over a few tokens."""
    held: str
    """The kinds of blocks or the dtypes of its weights."""
    nbytes: int
    """Bytes of it that a pass reads."""


def computed_parts(loaded: Loaded) -> tuple[ComputedPart, ...]:
    """Returns the parts of a model in the order in which a pass meets them, without those that hold
    no matrices, such as norms, and without tables of positions."""
    model: Any = loaded.model
    groups: dict[str, list[nn.Module]] = {"embedding": [model.get_input_embeddings()]}
    native: dict[str, int] = {}
    for layer in _layers(model):
        whole = isinstance(layer.__dict__.get("forward"), NativeLayer)
        for name, child in layer.named_children():
            if _holds_matrices(child):
                groups.setdefault(name, []).append(child)
                native[name] = native.get(name, 0) + whole
    head = model.get_output_embeddings()
    if head is not None:
        groups["output matrix"] = [head]
    known = {id(m) for group in groups.values() for member in group for m in member.modules()}
    left = [m for m in model.modules() if id(m) not in known]
    other = [m for m in left if _own_matrices(m) and not isinstance(m, nn.Embedding)]
    if other:
        groups["other"] = other
    return tuple(_part(name, group, native.get(name, 0)) for name, group in groups.items())


def _layers(model: nn.Module) -> list[nn.Module]:
    try:
        return decoder_layers(model)
    except UnsupportedModel:  # the whole model is then "other"
        return []


def _part(name: str, modules: list[nn.Module], native: int) -> ComputedPart:
    inner = [each for module in modules for each in module.modules()]
    kernels = "looked up" if name == "embedding" else " and ".join(kernels_of(inner)) or "plain"
    nbytes = sum(map(pass_bytes, modules))
    held = block_kinds(nn.ModuleList(modules)) or ", ".join(sorted(_dtypes(inner)))
    return ComputedPart(name, len(modules), kernels, native, held, nbytes)


def _holds_matrices(module: nn.Module) -> bool:
    return any(map(_own_matrices, module.modules()))


def _own_matrices(module: nn.Module) -> bool:
    if hasattr(module, "packed_bytes"):
        return True
    return any(each.dim() > 1 for each in module.parameters(recurse=False))


def _dtypes(modules: Iterable[nn.Module]) -> set[str]:
    return {str(dtype).removeprefix("torch.") for module in modules for dtype in _held(module)}


def _held(module: nn.Module) -> Iterator[torch.dtype]:
    """The dtypes of a module's own matrices."""
    read = getattr(module, "read", None)  # of layers that hold their weight in a form of their own
    if isinstance(read, torch.Tensor):
        yield read.dtype
    else:
        yield from (each.dtype for each in module.parameters(recurse=False) if each.dim() > 1)
