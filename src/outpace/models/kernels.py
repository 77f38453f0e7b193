"""Which product a model's linear layers use on a CPU: raced on this machine, not assumed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from statistics import median
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from outpace.errors import ConfigError, did_you_mean
from outpace.models import packed
from outpace.models.layers import exchange, linear_layers, matrix_of
from outpace.models.linear import RowConv1D, RowLinear
from outpace.models.packed import PackedLinear

Kernels = Literal["auto", "packed", "blocked", "off"]
KERNELS: tuple[Kernels, ...] = ("auto", "packed", "blocked", "off")

Dtypes = Collection[torch.dtype]
BLOCKED_DTYPES: Dtypes = frozenset({torch.float32})

SMALLEST_BLOCKED = 1 << 20
"""Elements of a weight from which blocks pay: smaller ones stay in the cache anyway, and the few
more operations of a blocked product then cost more than the second reading."""

SMALLEST_PACKED = 1 << 14
"""The same for packing, which takes no more operations than the plain product."""

RACE_ELEMENTS = 1 << 24
"""Elements of the weights that race: more than a cache holds."""

RACE_TURNS = 5
MARGIN = 0.9
"""Of the other products' time, what packed ones may take to be chosen: no coin decides a tie."""


def check(kernels: str) -> None:
    """Raises ``ConfigError`` for a kernel that does not exist."""
    if kernels not in KERNELS:
        raise ConfigError(f"unknown cpu_kernels {kernels!r}{did_you_mean(kernels, KERNELS)}.")


def speed_up(model: nn.Module, kernels: Kernels = "auto", smallest: int | None = None) -> int:
    """Exchanges the linear layers of a model for faster ones, in place; returns how many.

    "auto" packs the weights (`PackedLinear`) where a short race says that it pays on this machine,
    and otherwise reads large ones in blocks (`RowLinear`), where they can be used. "packed" and
    "blocked" ask for one of them and raise ``ConfigError`` where that cannot be. smallest:
    elements of a weight from which on it is exchanged; default: what suits the kernel.
    """
    check(kernels)
    if kernels == "off":
        return 0
    if kernels == "packed" or (kernels == "auto" and packing_pays(model)):
        _check_asked(model, kernels, packed.DTYPES, packed.available())
        return _exchange(model, _packed, packed.DTYPES, smallest or SMALLEST_PACKED)
    has_mkl: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    _check_asked(model, kernels, BLOCKED_DTYPES, has_mkl)
    if not has_mkl:
        return 0
    return _exchange(model, _blocked, BLOCKED_DTYPES, smallest or SMALLEST_BLOCKED)


def _check_asked(model: nn.Module, kernels: Kernels, dtypes: Dtypes, available: bool) -> None:
    weights: list[Any] = list(model.parameters())
    known = [w for w in weights if w.device.type == "cpu" and w.dtype in dtypes]
    if kernels != "auto" and not (available and known):
        names = " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ConfigError(
            f"cpu_kernels {kernels!r} is for {names} models on a CPU that torch has such products "
            "for: leave it at 'auto'."
        )


def _exchange(
    model: nn.Module, make: Callable[[Any], nn.Module], dtypes: Dtypes, smallest: int
) -> int:
    return exchange(model, lambda layer: make(layer) if _suits(layer, dtypes, smallest) else None)


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


def packing_pays(model: nn.Module) -> bool:
    """Returns whether packed weights are clearly faster here, for one row and for a few.

    The weights of the model's commonest shape race. MKL's product is two to five times slower than
    oneDNN's on the AMD processor that it was tried on, and on the Intel one a little faster.
    """
    if not packed.available():
        return False
    by_shape: dict[Any, list[Any]] = defaultdict(list)
    for parent, name in linear_layers(model):
        layer: Any = getattr(parent, name)
        if _suits(layer, packed.DTYPES, SMALLEST_PACKED):
            by_shape[layer.weight.shape].append(layer)
    if not by_shape:
        return False
    commonest = max(by_shape.values(), key=lambda group: sum(m.weight.numel() for m in group))
    racers = commonest[: 1 + RACE_ELEMENTS // commonest[0].weight.numel()]
    ours = [PackedLinear(matrix_of(module), None) for module in racers]
    width, dtype = ours[0].in_features, racers[0].weight.dtype
    inputs = [torch.ones(rows, width, dtype=dtype) for rows in (1, 6)]
    return _relative(ours, [_plain(module) for module in racers], inputs) < MARGIN


def _plain(module: Any) -> nn.Module:
    """What the layer would be without packing; the layer itself stays as it is."""
    if _suits(module, BLOCKED_DTYPES, SMALLEST_BLOCKED):
        return RowLinear(nn.Parameter(matrix_of(module), requires_grad=False), None)
    return module  # type: ignore[no-any-return]


@torch.inference_mode()
def _relative(
    ours: Sequence[nn.Module], theirs: Sequence[nn.Module], inputs: Sequence[Tensor]
) -> float:
    """Returns how long ours take for the inputs, relative to theirs: medians of turns."""
    took: tuple[list[float], list[float]] = ([], [])
    for _ in range(1 + RACE_TURNS):
        for layers, times in zip((ours, theirs), took, strict=True):
            begin = perf_counter()
            for layer in layers:
                for x in inputs:
                    layer(x)
            times.append(perf_counter() - begin)
    mine, other = (median(times[1:]) for times in took)  # the first turn warms up
    return mine / other
