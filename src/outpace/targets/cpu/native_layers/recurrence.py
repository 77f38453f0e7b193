"""Mixers with a recurrent state in the place of attention, as `recurrence.h` computes them: read
from transformers' modules.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from torch import nn

from outpace.targets.cpu.native_layers.probing import (
    SILU,
    Norm,
    NormStruct,
    activation_named,
    gated_norm_of,
    is_plain,
)
from outpace.targets.cpu.native_layers.product import Linear, outputs_of
from outpace.targets.cpu.weights.weight import LinearStruct, Weight, linear_struct

MOST_TAPS = 8
"""Inputs that a convolution sees (`recurrence.h`)."""
MOST_PRODUCTS = 4
"""Products of a layer's input."""


class MixerKind(IntEnum):
    """What mixes tokens, by the numbers in `recurrence.h`."""

    SHORT_CONVOLUTION = 1
    DELTA_RULE = 2
    SCAN = 3
    """Mamba-2's."""


class HeadOffsets(NamedTuple):
    """Where the numbers of a head lie among a token's products."""

    product: int = 0
    first: int = 0
    key_stride: int = 0
    """From key head to key head."""
    head_stride: int = 0
    """Between the heads that share a key head."""
    channel: int = 0
    """The number of the first head's first channel of the convolution."""


class Heads(NamedTuple):
    """The heads of a delta rule or a scan."""

    key_heads: int = 0
    heads_per_key: int = 0
    """Heads that share one."""
    key_dim: int = 0
    value_dim: int = 0

    @property
    def number(self) -> int:
        return self.key_heads * self.heads_per_key

    @property
    def keys(self) -> int:
        """Numbers of all keys of a token."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Numbers of all its values."""
        return self.number * self.value_dim

    @property
    def shared(self) -> int:
        """Numbers of those values that share a key head."""
        return self.heads_per_key * self.value_dim


NO_HEADS = Heads()
RATES = ("A_log", "dt_bias")
NAMES = ("query", "key", "value", "gate", "beta", "decay")
"""What heads have, by the fields in `recurrence.h`."""


class _OffsetsStruct(ctypes.Structure):
    """`HeadOffsets` of `recurrence.h`, field by field."""

    _fields_ = tuple((name, ctypes.c_int64) for name in HeadOffsets._fields)


class RecurrenceStruct(ctypes.Structure):
    """`Recurrence` of `recurrence.h`, field by field."""

    _fields_ = (
        ("products", LinearStruct * MOST_PRODUCTS),
        *((name, ctypes.c_int64) for name in ("count", "kind")),
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        *((name, ctypes.c_int64) for name in ("taps", "width", *Heads._fields)),
        *((name, _OffsetsStruct) for name in NAMES),
        *((name, ctypes.c_void_p) for name in ("a_log", "dt_bias", "d")),
        ("norm", NormStruct),
        ("activation", ctypes.c_int64),
    )


@dataclass(frozen=True, eq=False)
class Recurrence:
    """What keeps a state, as the library computes it."""

    module: Any
    """transformers' own, with a ``layer_idx``."""
    kind: MixerKind
    products: tuple[Linear, ...]
    """Products of the layer's input."""
    convolution: Any
    width: int
    """Inputs of the layer's last product."""
    heads: Heads = NO_HEADS
    offsets: tuple[HeadOffsets, ...] = ()
    """By `NAMES`."""
    norm: Norm | None = None
    activation: int = SILU
    inside: tuple[Any, ...] = ()
    """Other modules that are a part of it."""

    @property
    def modules(self) -> list[Any]:
        """The modules whose weights the library reads, besides those of the last product."""
        norms = [] if self.norm is None else [self.norm.module]
        return [*(linear.module for linear in self.products), self.convolution, *norms]

    @property
    def numbers(self) -> list[tuple[Any, str]]:
        """Where further numbers are that the library reads."""
        names = {MixerKind.DELTA_RULE: RATES, MixerKind.SCAN: (*RATES, "D")}.get(self.kind, ())
        return [(self.module._parameters, name) for name in names]

    @property
    def states(self) -> Mapping[str, tuple[int, ...]]:
        """The kinds of states (`StateName.kind`) and their shapes, for each row."""
        inputs = self.convolution.weight.shape
        found: dict[str, tuple[int, ...]] = {"conv": (inputs[0], inputs[2])}
        sizes = self.heads.key_dim, self.heads.value_dim
        if self.kind is MixerKind.DELTA_RULE:
            found["recurrent"] = (self.heads.number, *sizes)
        elif self.kind is MixerKind.SCAN:
            found["recurrent"] = (self.heads.number, *reversed(sizes))
        return found

    def struct(self, weights: Sequence[Weight]) -> RecurrenceStruct:
        """Returns it as the library reads it. weights: of its products."""
        products = list(map(linear_struct, weights))
        bias, numbers = self.convolution.bias, [held[name] for held, name in self.numbers]
        pointers: list[int | None] = [each.data_ptr() for each in numbers]
        return RecurrenceStruct(
            (LinearStruct * MOST_PRODUCTS)(*products),
            *(len(products), self.kind, self.convolution.weight.data_ptr()),
            None if bias is None else bias.data_ptr(),
            *(self.convolution.weight.shape[2], self.width, *self.heads),
            *(_OffsetsStruct(*place) for place in self.offsets or [HeadOffsets()] * len(NAMES)),
            *(*pointers, None, None, None)[:3],
            NormStruct() if self.norm is None else self.norm.struct(),
            self.activation,
        )


def recurrence_of(module: Any, lanes: int) -> Recurrence | None:
    """Returns what a module may compute if it keeps a state in a known way; None for others. Only
    a trial can show that it does."""
    parts = dict(module.named_children())
    known = (_short_convolution, _delta_rule, _scan)
    found = next((made for kind in known if (made := kind(module, parts)) is not None), None)
    return found if found is not None and recurrence_fits(found, lanes) else None


def _short_convolution(module: Any, parts: Mapping[str, Any]) -> Recurrence | None:
    """LFM2's: ``C * convolution(B * x)``."""
    if parts.keys() != {"conv", "in_proj", "out_proj"}:
        return None
    width = outputs_of(parts["in_proj"]) // 3
    linears = tuple(Linear(parts["in_proj"], i * width, width) for i in range(3))
    return Recurrence(module, MixerKind.SHORT_CONVOLUTION, linears, parts["conv"], width)


def _delta_rule(module: Any, parts: Mapping[str, Any]) -> Recurrence | None:
    """That of Qwen3-Next and Qwen3.5."""
    heads = _heads(module, ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim"))
    made = None if heads is None else _delta_parts(parts, heads)
    if heads is None or made is None:
        return None
    return _with_heads(module, MixerKind.DELTA_RULE, parts, heads, *made)


def _scan(module: Any, parts: Mapping[str, Any]) -> Recurrence | None:
    """Mamba-2's."""
    heads = _heads(module, ("n_groups", "num_heads", "ssm_state_size", "head_dim"))
    limits = tuple(getattr(module, "time_step_limit", ()))
    if heads is None or parts.keys() - {"act"} != {"in_proj", "conv1d", "norm", "out_proj"}:
        return None
    if limits != (0.0, float("inf")) or not all(hasattr(module, name) for name in (*RATES, "D")):
        return None
    mixed = heads.values + 2 * heads.keys
    sizes = [heads.values, mixed, heads.number]
    if sum(sizes) != outputs_of(parts["in_proj"]):
        return None
    begins = (0, heads.values, heads.values + mixed)
    pairs = zip(begins, sizes, strict=True)
    linears = tuple(Linear(parts["in_proj"], first, size) for first, size in pairs)
    keys, queries = heads.values, heads.values + heads.keys
    offsets = (
        HeadOffsets(1, queries, heads.key_dim, 0, queries),
        HeadOffsets(1, keys, heads.key_dim, 0, keys),
        HeadOffsets(1, 0, heads.shared, heads.value_dim),
        HeadOffsets(0, 0, heads.shared, heads.value_dim),
        HeadOffsets(),
        HeadOffsets(2, 0, heads.heads_per_key, 1),
    )
    return _with_heads(module, MixerKind.SCAN, parts, heads, linears, offsets)


def _heads(module: Any, names: Sequence[str]) -> Heads | None:
    """Returns a module's heads. names: what it calls the numbers of key heads and of heads, and the
    sizes of keys and values."""
    found = (getattr(module, name, None) for name in names)
    sizes = [each for each in found if isinstance(each, int) and each > 0]
    if len(sizes) < len(names):
        return None
    key_heads, heads, key_dim, value_dim = sizes
    return None if heads % key_heads else Heads(key_heads, heads // key_heads, key_dim, value_dim)


def _with_heads(
    module: Any,
    kind: MixerKind,
    parts: Mapping[str, Any],
    heads: Heads,
    linears: tuple[Linear, ...],
    offsets: tuple[HeadOffsets, ...],
) -> Recurrence | None:
    activation = activation_named(getattr(module, "activation", None))
    if activation is None:
        return None
    if kind is MixerKind.SCAN:
        norm = gated_norm_of(parts["norm"], heads.values, activation, groups=heads.key_heads)
    else:
        norm = gated_norm_of(parts["norm"], heads.value_dim, activation)
    if norm is None:
        return None
    return Recurrence(
        module=module,
        kind=kind,
        products=linears,
        convolution=parts["conv1d"],
        width=heads.values,
        heads=heads,
        offsets=offsets,
        norm=norm,
        activation=activation,
        inside=(parts["act"],) if "act" in parts else (),
    )


def _delta_parts(
    parts: Mapping[str, Any], heads: Heads
) -> tuple[tuple[Linear, ...], tuple[HeadOffsets, ...]] | None:
    """Returns the products of a layer's input, and where the numbers of heads are among these."""
    key_heads, each, key_dim, value_dim = heads
    keys, shared = heads.keys, heads.shared
    own = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")  # Qwen3.5
    mixed = ("in_proj_qkvz", "in_proj_ba")  # Qwen3-Next: the numbers of a key head lie together
    names = own if parts.keys() >= {*own} else mixed
    if parts.keys() != {*names, "conv1d", "norm", "out_proj"}:
        return None
    linears = tuple(Linear(parts[name], 0, outputs_of(parts[name])) for name in names)
    if names is own:
        offsets = (
            HeadOffsets(0, 0, key_dim),
            HeadOffsets(0, keys, key_dim, 0, keys),
            HeadOffsets(0, 2 * keys, shared, value_dim, 2 * keys),
            HeadOffsets(1, 0, shared, value_dim),
            HeadOffsets(2, 0, each, 1),
            HeadOffsets(3, 0, each, 1),
        )
        sizes = [2 * keys + heads.values, heads.values, heads.number, heads.number]
    else:
        size = 2 * key_dim + 2 * shared
        offsets = (
            HeadOffsets(0, 0, size),
            HeadOffsets(0, key_dim, size, 0, keys),
            HeadOffsets(0, 2 * key_dim, size, value_dim, 2 * keys),
            HeadOffsets(0, 2 * key_dim + shared, size, value_dim),
            HeadOffsets(1, 0, 2 * each, 1),
            HeadOffsets(1, each, 2 * each, 1),
        )
        sizes = [key_heads * size, 2 * heads.number]
    fits = sizes == [linear.outputs for linear in linears]
    return (linears, offsets) if fits else None


def recurrence_fits(found: Recurrence, lanes: int) -> bool:
    """Returns whether the library can compute a recurrence of these sizes and dtypes."""
    convolution, heads = found.convolution, found.heads
    plain = found.kind is MixerKind.SHORT_CONVOLUTION
    channels = found.width if plain else 2 * heads.keys + heads.values
    sizes = (found.width,) if plain else (heads.key_dim, heads.value_dim)
    if type(convolution) is not nn.Conv1d or not all(linear.fits for linear in found.products):
        return False
    numbers = [held[name] for held, name in found.numbers]
    weights = [convolution.weight, convolution.bias, *numbers]
    return (
        convolution.weight.shape[:2] == (channels, 1)
        and 1 < convolution.weight.shape[2] <= MOST_TAPS
        and convolution.groups == channels
        and (convolution.stride, convolution.dilation) == ((1,), (1,))
        and all(size and size % lanes == 0 for size in sizes)
        and all(each is None or is_plain(each) for each in weights)
        and all(each.shape == (heads.number,) for each in numbers)
    )
