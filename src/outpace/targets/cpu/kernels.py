"""Which product a model's linear layers use on a CPU: raced on this machine, not assumed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from outpace.errors import ConfigError, did_you_mean
from outpace.targets.cpu import packed
from outpace.targets.cpu.layers import exchange, linear_layers, matrix_of
from outpace.targets.cpu.linear import RowConv1D, RowLinear
from outpace.targets.cpu.native import native
from outpace.targets.cpu.native_linear import DTYPES as NATIVE_DTYPES
from outpace.targets.cpu.native_linear import NativeLinear, native_linear
from outpace.targets.cpu.packed import PackedLinear

Kernels = Literal["auto", "native", "packed", "blocked", "off"]
KERNELS: tuple[Kernels, ...] = ("auto", "native", "packed", "blocked", "off")
ASKED = frozenset({"native", "packed", "blocked"})
"""Those that are used or refused, never left out."""
NATIVE = frozenset({"auto", "native"})
"""Those with which whole layers may be played by our own code."""

Dtypes = Collection[torch.dtype]
BLOCKED_DTYPES: Dtypes = frozenset({torch.float32})

SMALLEST = {"native": 1 << 16, "packed": 1 << 14, "blocked": 1 << 20}
"""Elements of a weight from which a kernel pays: smaller ones stay in the cache anyway. A blocked
product takes a few more operations than the plain one."""

RACE_ELEMENTS = 1 << 24
"""Elements of the weights that race: more than a cache holds."""

RACE_ROWS = (1, 6)
RACE_TURNS = 5
HANDICAP = {"native": 1.0, "blocked": 1.2, "packed": 1.2}
"""What a kernel's time is multiplied by. Native products can be part of whole layers that are
played at once (`targets.block`), which saves as much; and a weight that oneDNN has packed is held a
second time where it is an embedding too."""


def check(kernels: str) -> None:
    """Raises ``ConfigError`` for a kernel that does not exist."""
    if kernels not in KERNELS:
        raise ConfigError(f"unknown cpu_kernels {kernels!r}{did_you_mean(kernels, KERNELS)}.")


def speed_up(model: nn.Module, kernels: Kernels = "auto", smallest: int | None = None) -> int:
    """Exchanges the linear layers of a model for faster ones, in place; returns how many.

    "auto" takes what wins a short race on this machine: products of our own (`NativeLinear`, where
    there is a C++ compiler), oneDNN's on packed weights (`PackedLinear`), or MKL's, on large
    weights in blocks (`RowLinear`). "native", "packed" and "blocked" ask for one of them and raise
    ``ConfigError`` where that cannot be. smallest: elements of a weight from which on it is
    exchanged; default: what suits the kernel.
    """
    check(kernels)
    if kernels == "off":
        return 0
    known = _known()
    if kernels != "auto":
        _check_asked(model, kernels, known)
    chosen = fastest(model) if kernels == "auto" else kernels
    if chosen not in known:
        return 0
    make, dtypes = known[chosen]
    least = smallest or SMALLEST[chosen]
    return exchange(model, lambda layer: make(layer) if _suits(layer, dtypes, least) else None)


Kernel = tuple[Callable[[Any], nn.Module], Dtypes]
"""What makes such a layer of a plain one, and the dtypes that it can be made of."""


def _known() -> Mapping[str, Kernel]:
    """Returns the kernels that there are here."""
    found: dict[str, Kernel] = {}
    library = native()
    if library is not None:
        found["native"] = lambda layer: native_linear(library, layer), NATIVE_DTYPES
    if packed.available():
        found["packed"] = _packed, packed.dtypes()
    if torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        found["blocked"] = _blocked, BLOCKED_DTYPES
    return found


def _check_asked(model: nn.Module, kernels: str, known: Mapping[str, Kernel]) -> None:
    if kernels not in known:
        lacks = "a C++ compiler" if kernels == "native" else "a build of torch that has them"
        raise ConfigError(f"cpu_kernels {kernels!r} needs {lacks}: leave it at 'auto'.")
    dtypes = known[kernels][1]
    if not any(w.device.type == "cpu" and w.dtype in dtypes for w in model.parameters()):
        names = " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ConfigError(
            f"cpu_kernels {kernels!r} is for {names} models on a CPU: leave it at 'auto'."
        )


def _suits(layer: Any, dtypes: Dtypes, smallest: int) -> bool:
    weight = layer.weight
    known = weight.device.type == "cpu" and weight.dtype in dtypes
    return bool(known and weight.numel() >= smallest)


def _blocked(layer: Any) -> RowLinear:
    kind = RowLinear if type(layer) is nn.Linear else RowConv1D
    return kind(layer.weight, layer.bias)


def _packed(layer: Any) -> PackedLinear:
    return PackedLinear(matrix_of(layer), layer.bias, shown_t=type(layer) is Conv1D)


# -- the race ----------------------------------------------------------------------------------


def fastest(model: nn.Module) -> str:
    """Returns the kernel that is fastest here for one row and for a few; "off" if there is none.

    The weights of the model's commonest shape race. What wins differs: MKL's product takes from
    half to five times as long as oneDNN's on AMD's processors, on one of Intel's a little less.
    """
    known = {
        name: make
        for name, (make, dtypes) in _known().items()
        if any(_suits(layer, dtypes, SMALLEST[name]) for layer in _layers(model))
    }
    if len(known) < 2:
        return next(iter(known), "off")
    racers = _commonest(model)
    width, dtype = matrix_of(racers[0]).shape[1], racers[0].weight.dtype
    inputs = [torch.ones(rows, width, dtype=dtype) for rows in RACE_ROWS]
    lanes = {name: [_ready(make(_copy(layer))) for layer in racers] for name, make in known.items()}
    took = _race(lanes, inputs)
    return min(took, key=lambda name: took[name] * HANDICAP[name])


def _layers(model: nn.Module) -> list[Any]:
    return [getattr(parent, name) for parent, name in linear_layers(model)]


def _commonest(model: nn.Module) -> Sequence[Any]:
    """Returns layers of the shape that holds the most weights, as many as fill a cache."""
    by_shape: dict[Any, list[Any]] = defaultdict(list)
    for layer in _layers(model):
        by_shape[layer.weight.shape].append(layer)
    most = max(by_shape.values(), key=lambda group: sum(layer.weight.numel() for layer in group))
    return most[: 1 + RACE_ELEMENTS // most[0].weight.numel()]


def _copy(layer: Any) -> nn.Linear:
    """Returns a layer for a kernel to be made of, which may change it: the model's stays."""
    matrix = matrix_of(layer)
    copy = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
    copy.weight = nn.Parameter(matrix, requires_grad=False)
    return copy


def _ready(layer: nn.Module) -> nn.Module:
    """Returns a layer as it will be."""
    if isinstance(layer, NativeLinear) and layer.can_be_laid_out:
        layer.lay_out()
    return layer


@torch.inference_mode()
def _race(lanes: Mapping[str, Sequence[nn.Module]], inputs: Sequence[Tensor]) -> dict[str, float]:
    """Returns how many seconds the layers of each lane take for the inputs, in its best turn: what
    else runs on the processor only adds to that."""
    took: dict[str, list[float]] = {name: [] for name in lanes}
    for _ in range(1 + RACE_TURNS):
        for name, layers in lanes.items():
            begin = perf_counter()
            for layer in layers:
                for x in inputs:
                    layer(x)
            took[name].append(perf_counter() - begin)
    return {name: min(times) for name, times in took.items()}
