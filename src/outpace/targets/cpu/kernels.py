"""The kernels of a model's linear layers on a CPU: chosen by a fixed rule, a race, or by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from outpace.core.values import shown
from outpace.errors import ConfigError, did_you_mean
from outpace.targets.cpu.library.processor import Processor, this_processor
from outpace.targets.cpu.linear import PackedLinear, RowConv1D, RowLinear, can_pack, packable_dtypes
from outpace.targets.cpu.native import build
from outpace.targets.cpu.native_layers.linear import DTYPES as NATIVE_DTYPES
from outpace.targets.cpu.native_layers.linear import native_linear
from outpace.targets.cpu.race import fastest
from outpace.targets.cpu.weights.layers import linear_layers, matrix_of, replace_modules

LOGGER = logging.getLogger("outpace")

Kernels = Literal["auto", "tune", "native", "packed", "blocked", "off"]
KERNELS: tuple[Kernels, ...] = ("auto", "tune", "native", "packed", "blocked", "off")
EXPLICIT_KERNELS = frozenset({"native", "packed", "blocked"})
"""Names of one kernel: it is used, or refused with an error, but never left out in silence."""
NATIVE = frozenset({"auto", "tune", "native"})
"""Choices with which whole layers may be computed by our own code."""
LEFT_OPEN = frozenset({"auto", "tune"})
"""Choices with which it is left to us in which form a drafter holds its weights."""

MIN_ELEMENTS = {"native": 1 << 16, "packed": 1 << 14, "blocked": 1 << 20}
"""Elements of a weight from which on a kernel pays. A blocked product takes a few more operations
than the plain one."""

Dtypes = Collection[torch.dtype]
BLOCKED_DTYPES: Dtypes = frozenset({torch.float32})


@dataclass(frozen=True)
class Kernel:
    """One way to compute the product of a linear layer."""

    make: Callable[[Any], nn.Module]
    """Returns such a layer with the parameters of a plain one."""
    dtypes: Dtypes
    """The dtypes of weights that it takes."""
    smallest: int
    """Elements of a weight from which on it pays: smaller ones stay in the processor's cache."""

    def suits(self, layer: Any) -> bool:
        """Returns whether it can compute a plain linear layer, and is worth it."""
        weight = layer.weight
        takes = weight.device.type == "cpu" and weight.dtype in self.dtypes
        return bool(takes and weight.numel() >= self.smallest)


def check(kernels: str) -> None:
    """Raises ``ConfigError`` for a kernel that does not exist."""
    if not isinstance(kernels, str):
        raise ConfigError(f"cpu_kernels must be {' or '.join(KERNELS)}, not {shown(kernels)}.")
    if kernels not in KERNELS:
        raise ConfigError(f"unknown cpu_kernels {kernels!r}{did_you_mean(kernels, KERNELS)}.")


def speed_up(model: nn.Module, kernels: Kernels = "auto", smallest: int | None = None) -> int:
    """Replaces the linear layers of a model by faster ones, in place; returns how many.

    "auto" follows a fixed rule (`preferred`), so that machines of the same kind compute the same
    bits. "tune" races the kernels on this machine and takes the fastest. "native" (our own
    products, `NativeLinear`, which need a C++ compiler), "packed" (oneDNN's products of packed
    weights, `PackedLinear`) and "blocked" (MKL's, of large weights in blocks, `RowLinear`) ask for
    one kernel, and raise ``ConfigError`` where it cannot be used. "off" changes nothing.
    smallest: elements of a weight from which on it is replaced; default: what suits the kernel.
    """
    check(kernels)
    layers: list[Any] = [getattr(parent, name) for parent, name in linear_layers(model)]
    if kernels == "off" or (kernels not in EXPLICIT_KERNELS and not any(map(_replaceable, layers))):
        return 0
    known = available()
    if kernels in EXPLICIT_KERNELS:
        _check_asked(model, kernels, known)
    by_dtype = {
        dtype: _chosen(kernels, dtype, layers, known)
        for dtype in {layer.weight.dtype for layer in layers}
    }
    del layers  # each is released once it is replaced

    def make(layer: Any) -> nn.Module | None:
        kernel = known.get(by_dtype[layer.weight.dtype])
        if kernel is None:
            return None
        kernel = kernel if smallest is None else replace(kernel, smallest=smallest)
        return kernel.make(layer) if kernel.suits(layer) else None

    return replace_modules(linear_layers(model), make)


def preferred(dtype: torch.dtype, processor: Processor) -> tuple[str, ...]:
    """Returns the kernels for weights of a dtype, the best one first.

    The rule depends on the kind of processor and on nothing that a clock says. It was measured with
    ``lab/measure/kernel_choice.py``; the figures are in decision 5.
    """
    if dtype == torch.bfloat16 and processor.multiplies_bfloat16:
        return "packed", "native"
    if processor.vendor == "GenuineIntel":
        return "native", "blocked", "packed"
    return "native", "packed", "blocked"


def available() -> Mapping[str, Kernel]:
    """Returns the kernels that can be used on this machine, by name."""
    found: dict[str, Kernel] = {}
    library = build().library
    if library is not None:
        make = partial(native_linear, library)
        dtypes = frozenset(filter(library.takes, NATIVE_DTYPES))
        found["native"] = Kernel(make, dtypes, MIN_ELEMENTS["native"])
    if can_pack():
        found["packed"] = Kernel(_packed, packable_dtypes(), MIN_ELEMENTS["packed"])
    if torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        found["blocked"] = Kernel(_blocked, BLOCKED_DTYPES, MIN_ELEMENTS["blocked"])
    return found


def _replaceable(layer: Any) -> bool:
    """Returns whether some kernel might take a layer: asked before anything is compiled."""
    return layer.weight.device.type == "cpu" and layer.weight.dtype in NATIVE_DTYPES


def _chosen(
    kernels: Kernels, dtype: torch.dtype, layers: Sequence[Any], known: Mapping[str, Kernel]
) -> str:
    """Returns the name of the kernel for the layers of a dtype: "off" if there is none."""
    if kernels in EXPLICIT_KERNELS:
        return kernels
    alike = [layer for layer in layers if layer.weight.dtype == dtype]
    order = [name for name in preferred(dtype, this_processor()) if name in known]
    order = [name for name in order if any(map(known[name].suits, alike))]
    if kernels == "auto" or len(order) < 2:
        return next(iter(order), "off")
    won = fastest(alike, {name: known[name].make for name in order})
    LOGGER.info("cpu_kernels 'tune': %r won the race of %s for %s", won, order, dtype)
    return won


def _check_asked(model: nn.Module, kernels: str, known: Mapping[str, Kernel]) -> None:
    if kernels not in known:
        why = build().problem if kernels == "native" else "this build of torch lacks them"
        raise ConfigError(f"cpu_kernels {kernels!r} cannot be used: {why}; leave it at 'auto'.")
    dtypes = known[kernels].dtypes
    if not any(w.device.type == "cpu" and w.dtype in dtypes for w in model.parameters()):
        names = " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ConfigError(
            f"cpu_kernels {kernels!r} is for {names} models on a CPU: leave it at 'auto'."
        )


def _blocked(layer: Any) -> RowLinear:
    kind = RowLinear if type(layer) is nn.Linear else RowConv1D
    return kind(layer.weight, layer.bias)


def _packed(layer: Any) -> PackedLinear:
    return PackedLinear(matrix_of(layer), layer.bias, shown_t=type(layer) is Conv1D)
