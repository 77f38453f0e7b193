"""Decoder layers of the Llama kind as `native.cpp` plays them, for passes over a few tokens."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outpace.targets.cpu.layers import hooks_of
from outpace.targets.cpu.native import Native, Part, Weight, part
from outpace.targets.cpu.native_linear import FEW, NativeLinear
from outpace.targets.cpu.rotary import Angles
from outpace.targets.hf.cache import SlotCache, Writing

PARTS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
NORMS = ("input_layernorm", "post_attention_layernorm")
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, Part) for name in ("query", "key", "value", "output", "gate", "up", "down")),
        *((name, ctypes.c_void_p) for name in ("before", "after", "query_norm", "key_norm")),
        *((name, ctypes.c_int64) for name in ("hidden", "heads", "groups", "dim", "inner")),
        ("eps", ctypes.c_float),
        ("scaling", ctypes.c_float),
    )


class _Pass(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "columns", "view", "rotary")),
        *((name, ctypes.c_void_p) for name in ("cosines", "sines", "positions", "starts", "mask")),
        *((name, ctypes.c_int64) for name in ("mask_row", "mask_column")),
        *((name, ctypes.c_int64) for name in ("cache_row", "cache_head")),
        ("scratch", ctypes.c_void_p),
    )


class LayerStack:
    """Layers that follow one another, all with heads of the same number and size."""

    def __init__(
        self,
        library: Native,
        layers: Sequence[nn.Module],
        plans: PassDescriptions,
        norm: nn.Module | None = None,
        head: nn.Module | None = None,
    ) -> None:
        """layers: of the kind. plans: those of the same model. norm, head: what comes after the
        last."""
        self._library = library
        self._layers = [_Modules(layer) for layer in layers]
        self._plans = plans
        self._norm: Any = norm
        self._head = head if takes_head(head) else None
        last: list[Any] = [module for module in (norm, self._head) if module is not None]
        modules = [module for layer in self._layers for module in layer.weighted]
        # Dictionaries of parameters: asking a module for one takes three times as long.
        self._weights: list[tuple[Any, str]] = [
            (module._parameters, getattr(module, "held", "weight")) for module in (*modules, *last)
        ]
        inside = [module for layer in layers for module in layer.modules()]
        self._hooks = [hooks for module in (*inside, *last) for hooks in hooks_of(module)]
        self._told: _Told | None = None
        self._rooms: _Rooms | None = None

    @property
    def watched(self) -> bool:
        """Whether somebody has hooked a module since, whose own code must run then."""
        return any(self._hooks)

    @property
    def has_head(self) -> bool:
        """Whether it can make logits."""
        return self._head is not None

    def play(self, x: Tensor, angles: Angles, cache: SlotCache, mask: Tensor | None) -> None:
        """Replaces x by what the layers make of it.

        x: float32 ``[A, T, hidden]``, contiguous; mask: bool ``[A, 1, T, S]``, or nothing where all
        is seen, or all up to the token itself.
        """
        self._play(self._ready(), x, angles, cache, mask, (None, None, 0))

    def logits(
        self, x: Tensor, angles: Angles, cache: SlotCache, mask: Tensor | None, keep: int
    ) -> Tensor:
        """Returns the logits of each row's last tokens, ``[A, keep, V]``, where it `has_head`."""
        told = self._ready()
        assert told.head is not None
        found = x.new_empty(x.shape[0], keep, told.head.outputs)
        ending = ctypes.byref(told.head), found.data_ptr(), keep
        self._play(told, x, angles, cache, mask, ending)
        return found

    def _play(
        self,
        told: _Told,
        x: Tensor,
        angles: Angles,
        cache: SlotCache,
        mask: Tensor | None,
        ending: Any,
    ) -> None:
        rooms = self._rooms_of(cache, told, x)
        plan = self._plans.of(cache.writing, mask, angles, rooms.strides, told.scratch)
        pointers = rooms.keys, rooms.values, told.norm, told.threads
        self._library.layers(told.layers, plan.told, x, *pointers, ending)

    def _rooms_of(self, cache: SlotCache, told: _Told, x: Tensor) -> _Rooms:
        """Returns where the layers' keys and values are, anew if the cache is another or grew."""
        found, first = self._rooms, cache.writing.first
        if found is None or found.cache() is not cache or found.of != (cache.capacity, first):
            layer = told.layers[0]
            rooms = [cache.room(index, layer.groups, layer.dim, x) for index in told.indices]
            pointers = ctypes.c_void_p * len(rooms)
            found = self._rooms = _Rooms(
                keys=pointers(*(keys.data_ptr() for keys, _ in rooms)),
                values=pointers(*(values.data_ptr() for _, values in rooms)),
                strides=rooms[0][0].stride()[:2],
                cache=weakref.ref(cache),
                of=(cache.capacity, first),
            )
        return found

    def _ready(self) -> _Told:
        """Returns what the library is told, anew if a weight has moved."""
        pointers = [parameters[name].data_ptr() for parameters, name in self._weights]
        threads = torch.get_num_threads()
        told = self._told
        if told is None or told.pointers != pointers or told.threads != threads:
            told = self._told = self._tell(pointers, threads)
        return told

    def _tell(self, pointers: list[int], threads: int) -> _Told:
        weights = [layer.weights() for layer in self._layers]
        layers = (_Layer * len(weights))(
            *(layer.told(of) for layer, of in zip(self._layers, weights, strict=True))
        )
        head = None if self._head is None else _weight(self._head)
        return _Told(
            layers=layers,
            indices=[layer.attention.layer_idx for layer in self._layers],
            norm=None if self._norm is None else self._norm.weight.data_ptr(),
            head=None if head is None else part(head),
            threads=threads,
            scratch=max(self._library.scratch(layer, threads) for layer in layers),
            pointers=pointers,
            weights=[*weights, [] if head is None else [head]],
        )


@dataclass(frozen=True)
class _Told:
    layers: ctypes.Array[_Layer]
    indices: list[int]  # of the layers, in the cache
    norm: int | None
    head: Part | None
    threads: int
    scratch: int  # floats per token
    pointers: list[int]
    weights: list[list[Weight]]  # alive as long as the layers may be read


@dataclass(frozen=True)
class _Rooms:
    keys: ctypes.Array[ctypes.c_void_p]  # by layer
    values: ctypes.Array[ctypes.c_void_p]
    strides: tuple[int, ...]  # of rows and heads
    cache: weakref.ref[SlotCache]
    of: tuple[int, int]  # its capacity, and the first row


class _Modules:
    """The parts of one layer."""

    def __init__(self, layer: nn.Module) -> None:
        self.attention: Any = layer.self_attn
        self.linears: list[Any] = [layer.get_submodule(name) for name in PARTS]
        norms = [*NORMS, *(HEAD_NORMS if hasattr(layer.self_attn, "q_norm") else ())]
        self.norms: list[Any] = [layer.get_submodule(name) for name in norms]
        self.weighted = [*self.linears, *self.norms]

    def weights(self) -> list[Weight]:
        return [_weight(linear) for linear in self.linears]

    def told(self, weights: Sequence[Weight]) -> _Layer:
        parts = [part(weight) for weight in weights]
        norms = [norm.weight.data_ptr() for norm in self.norms]
        dim = self.attention.head_dim
        return _Layer(
            *parts,
            *(norms if len(norms) == 4 else [*norms, None, None]),
            *(self.linears[0].in_features, parts[0].outputs // dim, parts[1].outputs // dim),
            *(dim, parts[4].outputs, eps_of(self.norms[0]), self.attention.scaling),
        )


def playable(x: Tensor) -> bool:
    """Whether hidden states ``[A, T, hidden]`` are what a `LayerStack` is made for."""
    plain = x.dtype == torch.float32 and x.device.type == "cpu" and not torch.is_grad_enabled()
    return few(x) and plain


def few(tokens: Tensor) -> bool:
    """Whether a pass over tokens ``[A, T, ...]`` is small enough."""
    return 0 < tokens.shape[0] * tokens.shape[1] <= FEW and not torch.compiler.is_compiling()


def takes_head(head: Any) -> bool:
    """Whether a model's last product can be played with its layers."""
    return isinstance(head, NativeLinear) and head.told().matrix.is_contiguous()


def eps_of(norm: Any) -> float | None:
    """Returns what an RMS norm adds to the mean of squares."""
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _weight(linear: Any) -> Weight:
    if isinstance(linear, NativeLinear):
        return linear.told()
    return Weight(linear.weight, None, linear.bias)


# -- passes ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PassDescription:
    told: _Pass
    source: tuple[Any, ...]  # what it was made of, by identity
    numbers: tuple[int, ...]  # and by value
    alive: tuple[Tensor | None, ...]  # what it points to


class PassDescriptions:
    """What a model's layers are told of the current pass: the same for most of them."""

    def __init__(self) -> None:
        self._last: _PassDescription | None = None  # replaced as one: threads

    def of(
        self,
        writing: Writing,
        mask: Tensor | None,
        angles: Angles,
        strides: tuple[int, ...],
        size: int,
    ) -> _PassDescription:
        """Returns what layers are told of a pass.

        mask: bool ``[A, 1, T, S]``; strides: of the cache's rows and heads; size: floats per token
        that the layer needs to work in.
        """
        last, source, numbers = self._last, (writing, mask, *angles), (*strides, size)
        if last is not None and last.numbers == numbers and _same(last.source, source):
            return last
        self._last = _plan(writing, mask, angles, numbers)
        return self._last


def _same(old: Sequence[Any], new: Sequence[Any]) -> bool:
    return all(one is other for one, other in zip(old, new, strict=True))


def _plan(
    writing: Writing, mask: Tensor | None, angles: Angles, numbers: tuple[int, ...]
) -> _PassDescription:
    row, head, size = numbers
    cosines, sines = angles.cosines.contiguous(), angles.sines.contiguous()
    positions = None if angles.positions is None else angles.positions.contiguous()
    rows, columns = writing.rows, writing.columns
    source = writing, mask, *angles
    if mask is None and columns > 1:  # a prompt, which follows nothing: plainly causal
        mask = torch.ones(columns, columns, dtype=torch.bool).tril().expand(rows, 1, -1, -1)
    if mask is not None and mask.stride(-1) != 1:
        mask = mask.contiguous()
    scratch = cosines.new_empty(rows * columns * size)
    told = _Pass(
        *(rows, columns, writing.view, cosines.shape[-1]),
        *(cosines.data_ptr(), sines.data_ptr()),
        None if positions is None else positions.data_ptr(),
        writing.starts.data_ptr(),
        *((None, 0, 0) if mask is None else (mask.data_ptr(), mask.stride(0), mask.stride(2))),
        *(row, head, scratch.data_ptr()),
    )
    return _PassDescription(told, source, numbers, (cosines, sines, positions, mask, scratch))
