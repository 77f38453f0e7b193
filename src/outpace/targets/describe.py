"""Says how a loaded model is computed: by which kernels, on how many threads, in which dtype, and
what a pass reads of each part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outpace.errors import UnsupportedModel
from outpace.targets.cpu.kernels import NATIVE
from outpace.targets.cpu.library.processor import this_processor
from outpace.targets.cpu.linear import PackedLinear, RowLinear
from outpace.targets.cpu.native import build, slow_because
from outpace.targets.cpu.native_layers.blocks import NativeBlockLinear
from outpace.targets.cpu.native_layers.layer import NativeLayer
from outpace.targets.cpu.native_layers.linear import DTYPES as NATIVE_DTYPES
from outpace.targets.cpu.native_layers.linear import NativeLinear
from outpace.targets.cpu.native_layers.model import NativeModel
from outpace.targets.cpu.weights.blocks import BlockLinear, block_bytes, embedding_dtype
from outpace.targets.cpu.weights.quantize import Int8Linear
from outpace.targets.hf.device_map import places
from outpace.targets.hf.loading.loaded import End, LoadedModel
from outpace.targets.hf.partial.layers import decoder_layers
from outpace.targets.hf.weights import pass_bytes
from outpace.targets.parallel.load import SplitModel

KERNELS = {
    "native": NativeLinear,
    "packed": PackedLinear,
    "blocked": RowLinear,
    "packed int8": Int8Linear,
    "integer": NativeBlockLinear,
    "dequantized": BlockLinear,
}
"""By the name of a kernel, the class of layers that are computed by it."""


_BUNDLED = Path(__file__).parents[1] / "bundled"


def short_name(name: str) -> str:
    """Returns a model's name as a person wants to read it: without the path of the bundled ones.

    >>> short_name("some/model")
    'some/model'
    """
    path = Path(name)
    return f"the bundled {path.name}" if path.parent == _BUNDLED else name


@dataclass(frozen=True)
class Description:
    """How one model is computed. ``str()`` gives one line."""

    name: str
    """Its path or hub name; "the bundled target" or "the bundled drafter" for those."""
    device: str
    """The kind of device that computes it, or all places that its parts lie on."""
    dtype: str
    """The dtype of its activations."""
    quantization: str | None
    lora: str | None
    """The folder of the adapter that is merged into its weights."""
    blocks: str | None
    """The kinds of blocks that its weights are in, with their share of the bytes in blocks:
    "Q4_K 71 %, Q6_K 29 %" """
    kernels: str
    """Which products its linear layers use: "native" (our own), "integer" (our own, of weights in
    blocks), "packed", "blocked", "packed int8", "dequantized" (torch's, of weights that are in
    blocks and are dequantised in each pass), or "plain" (torch's)."""
    tuned: bool
    """Whether the kernels were chosen by a race instead of by the fixed rule."""
    layers: int
    """Decoder layers."""
    native_layers: int
    """Decoder layers of which our own code computes everything in passes over a few tokens."""
    whole_model: bool
    """Whether our own code computes such passes from the first layer to the logits, in one call."""
    instructions: str
    """The strongest instruction set of the processor: "AMX", "AVX-512", "AVX2", "NEON", ..."""
    threads: int
    slow: str | None = None
    """Why the model is slower than it could be and what to do, where that is known."""
    drafter: Description | None = None
    drafts_with: str | None = None
    """The part of its own checkpoint that drafts for it: "its multi-token-prediction module"."""
    ends: tuple[End, ...] = ()
    """The tokens that end a text, with who names each of them."""
    processes: int = 1
    """Over how many of them its weights are split."""
    kv_cache_dtype: str = "auto"
    """In what its keys and values are cached: "auto" (the dtype of its activations), "int8" or
    "fp8"."""

    def __str__(self) -> str:
        where = self.device
        if where == "cpu":
            where += f" ({self.instructions}, {self.threads} thread{'s'[: self.threads > 1]})"
        if self.processes > 1:
            where += f" in each of {self.processes} processes"
        held = " in ".join(filter(None, (self.quantization or self.blocks, self.dtype)))
        computed = f"{self.kernels} kernels" + " chosen by a race" * self.tuned
        if self.native_layers:
            computed += f", {self.native_layers} of {self.layers} layers in native code"
        if self.whole_model:
            computed += ", in one call"
        if self.kv_cache_dtype != "auto":
            held += f" with {self.kv_cache_dtype} keys and values"
        name = self.name if self.lora is None else f"{self.name} with the adapter {self.lora}"
        line = f"{name} on {where}, {held}: {computed}"
        if self.slow is not None:
            line += f"; {self.slow}"
        if self.drafts_with is not None:
            line += f"; {self.drafts_with} drafts"
        if self.ends:
            line += f"; texts end with {', '.join(map(str, self.ends))}"
        if self.drafter is None:
            return line
        same = self.drafter.slow == self.slow  # saying it once is enough
        return f"{line} | drafter {replace(self.drafter, slow=None) if same else self.drafter}"


def describe(loaded: LoadedModel, drafter: LoadedModel | None = None) -> Description:
    """Returns how a model is computed, and its drafter, if that is a model."""
    modules = list(loaded.model.modules())
    kinds = kernels_of(modules)
    forwards = [module.__dict__.get("forward") for module in modules]
    return Description(
        name=short_name(loaded.name),
        device=places(loaded.model) or loaded.device.type,
        dtype=str(_activations(loaded)).removeprefix("torch."),
        quantization=loaded.quantization,
        lora=None if loaded.lora is None else str(loaded.lora),
        blocks=block_kinds(loaded.model),
        kernels=" and ".join(kinds) or "plain",
        tuned=loaded.cpu_kernels == "tune",
        layers=int(getattr(loaded.config, "num_hidden_layers", 0)),
        native_layers=sum(isinstance(forward, NativeLayer) for forward in forwards),
        whole_model=isinstance(loaded.model.__dict__.get("forward"), NativeModel),
        instructions=this_processor().instructions,
        threads=torch.get_num_threads(),
        slow=_slow(loaded, kinds),
        drafter=None if drafter is None else describe(drafter),
        processes=loaded.processes.count if isinstance(loaded, SplitModel) else 1,
    )


def kernels_of(modules: Iterable[nn.Module]) -> list[str]:
    """Returns the names of the kernels that compute some modules' linear layers; nothing where
    torch's own do."""
    listed = list(modules)
    return [name for name, kind in KERNELS.items() if any(isinstance(m, kind) for m in listed)]


def block_kinds(model: nn.Module) -> str | None:
    """Returns the kinds of blocks of a model's weights, the largest share first: "Q4_K 71 %, Q6_K
    29 %"; None where none are in blocks."""
    sizes = block_bytes(model)
    whole = sum(sizes.values())
    order = sorted(sizes, key=lambda kind: -sizes[kind])
    return ", ".join(f"{kind} {100 * sizes[kind] / whole:.0f} %" for kind in order) or None


def _activations(loaded: LoadedModel) -> torch.dtype:
    model: Any = loaded.model  # its weights may be held in a narrower dtype
    return embedding_dtype(model.get_input_embeddings())


def _slow(loaded: LoadedModel, kinds: list[str]) -> str | None:
    if "dequantized" in kinds and loaded.cpu_kernels != "off":
        return (
            "several times slower than with our own products of blocks, because these are not "
            "there for this dtype, these kinds of blocks, or this machine"
        )
    takes = loaded.device.type == "cpu" and _activations(loaded) in NATIVE_DTYPES
    if not takes or ("dequantized" not in kinds and {"native", "integer"} & set(kinds)):
        return None
    if loaded.cpu_kernels is None:
        return (
            "slower than with outpace's own kernels, because a model object that was handed over "
            "keeps its layers: give the model's path or hub name instead"
        )
    problem = build().problem if loaded.cpu_kernels in NATIVE else None
    return None if problem is None else slow_because(problem)


# -- the parts of a model --------------------------------------------------------------------------


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


def computed_parts(loaded: LoadedModel) -> tuple[ComputedPart, ...]:
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
