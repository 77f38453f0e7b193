"""Whole decoder layers of the Llama kind in one call, for passes over a few tokens.

Most of what a layer does besides its products is launching some forty small operations, which takes
longer than the operations. A layer that is found to be of the common kind (RMS norms, rotary
attention, a gated SiLU) is played by `native.cpp` instead: what a token gets then has the same bits
whatever else is in the pass, drafts included. Long prompts, and all that is not of that kind, stay
with transformers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outpace.core.tree import Tree
from outpace.models.cache import SlotCache, Writing
from outpace.models.native import Native, Part, Weight, native, part
from outpace.models.native_linear import FEW, NativeLinear
from outpace.models.runner import Runner

PARTS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
NORMS = ("input_layernorm", "post_attention_layernorm")
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
CHILDREN = {"self_attn", "mlp", *NORMS}
"""All that such a layer consists of."""

MOST_EACH = 64
"""Query heads that may share a key head."""

TOLERANCE = 1e-4
"""By how much of what a layer adds its played result may be off: rounding is some 1e-6 of it."""

ROUNDING = 1e-6
"""The same, of what it is added to."""


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
        *((name, ctypes.c_void_p) for name in ("cosines", "sines", "slots", "mask")),
        *((name, ctypes.c_int64) for name in ("mask_row", "mask_column")),
        *((name, ctypes.c_int64) for name in ("cache_row", "cache_head")),
        ("scratch", ctypes.c_void_p),
    )


class Block:
    """Plays one decoder layer: the ``forward`` of that layer, in the place of its own."""

    def __init__(self, library: Native, layer: nn.Module, plans: Plans) -> None:
        """layer: one that looks `_like_llama`. plans: those of the same model."""
        self.plain: Any = layer.forward
        self._library = library
        self._plans = plans
        self._attention: Any = layer.self_attn
        self._linears: list[Any] = [layer.get_submodule(name) for name in PARTS]
        norms = [*NORMS, *(HEAD_NORMS if _has_head_norms(layer) else ())]
        self._norms: list[Any] = [layer.get_submodule(name) for name in norms]
        self._told: _Told | None = None

    def __call__(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        """Returns the layer's output ``[A, T, hidden]``."""
        mask = options.get("attention_mask")
        cached = isinstance(options.get("past_key_values"), SlotCache) and not args
        boolean = mask is None or mask.dtype == torch.bool
        if not (cached and boolean and _playable(hidden_states)):
            return self.plain(hidden_states, *args, **options)
        return self.play(hidden_states, **options)

    def play(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        past_key_values: SlotCache,
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Returns the same, played by the library."""
        told = self._ready()
        layer, cache = told.layer, past_key_values
        index = self._attention.layer_idx
        keys, values = cache.room(index, layer.groups, layer.dim, hidden_states)
        plan = self._plans.of(
            cache.writing, attention_mask, position_embeddings, keys, told.scratch
        )
        y = hidden_states.clone(memory_format=torch.contiguous_format)
        self._library.layer(layer, plan.told, y, keys, values)
        return y

    def _ready(self) -> _Told:
        """Returns what the library is told, anew if a weight has moved."""
        tensors = [module._parameters["weight"] for module in (*self._linears, *self._norms)]
        pointers = [tensor.data_ptr() for tensor in tensors]
        if self._told is None or self._told.pointers != pointers:
            self._told = self._tell(pointers)
        return self._told

    def _tell(self, pointers: list[int]) -> _Told:
        attention = self._attention
        weights = [_weight(linear) for linear in self._linears]
        parts = [part(weight) for weight in weights]
        norms = [norm.weight.data_ptr() for norm in self._norms]
        dim = attention.head_dim
        layer = _Layer(
            *parts,
            *(norms if len(norms) == 4 else [*norms, None, None]),
            *(self._linears[0].in_features, parts[0].outputs // dim, parts[1].outputs // dim),
            *(dim, parts[4].outputs, _eps(self._norms[0]), attention.scaling),
        )
        return _Told(layer, self._library.scratch(layer), pointers, weights)


@dataclass(frozen=True)
class _Told:
    layer: _Layer
    scratch: int  # floats per token
    pointers: list[int]
    weights: list[Weight]  # alive as long as the layer may be read


def _playable(x: Tensor) -> bool:
    few = 0 < x.shape[0] * x.shape[1] <= FEW
    plain = x.dtype == torch.float32 and x.device.type == "cpu" and not torch.is_grad_enabled()
    return few and plain and not torch.compiler.is_compiling()


# -- passes ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    told: _Pass
    source: tuple[Any, ...]  # what it was made of, by identity
    alive: tuple[Tensor | None, ...]  # what it points to


class Plans:
    """What a model's layers are told of the current pass: the same for most of them."""

    def __init__(self) -> None:
        self._last: _Plan | None = None  # replaced as one: threads

    def of(
        self,
        writing: Writing,
        mask: Tensor | None,
        turned: tuple[Tensor, Tensor],
        keys: Tensor,
        size: int,
    ) -> _Plan:
        """Returns what layers are told of a pass.

        mask: bool ``[A, 1, T, S]``; turned: cosines and sines ``[A, T, D]``; keys: a layer's cache
        ``[A, G, S, D]``; size: floats per token that the layer needs to work in.
        """
        last = self._last
        source = writing, mask, *turned
        shape = keys.stride(0), keys.stride(1), size
        if last is not None and last.source[4:] == shape and _same(last.source[:4], source):
            return last
        self._last = _plan(writing, mask, turned, (*source, *shape))
        return self._last


def _same(old: Sequence[Any], new: Sequence[Any]) -> bool:
    return all(one is other for one, other in zip(old, new, strict=True))


def _plan(
    writing: Writing,
    mask: Tensor | None,
    turned: tuple[Tensor, Tensor],
    source: tuple[Any, ...],
) -> _Plan:
    *_, row, head, size = source
    cosines, sines = (angles.contiguous() for angles in turned)
    slots = writing.where[1].contiguous()
    rows, columns = writing.rows, writing.columns
    if mask is None and columns > 1:  # a prompt, which follows nothing: plainly causal
        mask = torch.ones(columns, columns, dtype=torch.bool).tril().expand(rows, 1, -1, -1)
    if mask is not None and mask.stride(-1) != 1:
        mask = mask.contiguous()
    scratch = cosines.new_empty(rows * columns * size)
    told = _Pass(
        *(rows, columns, writing.view, cosines.shape[-1]),
        *(cosines.data_ptr(), sines.data_ptr(), slots.data_ptr()),
        *((None, 0, 0) if mask is None else (mask.data_ptr(), mask.stride(0), mask.stride(2))),
        *(row, head, scratch.data_ptr()),
    )
    return _Plan(told, source, (cosines, sines, slots, mask, scratch))


# -- which layers ------------------------------------------------------------------------------


@torch.inference_mode()
def play_blocks(model: nn.Module) -> int:
    """Lets the library play those layers of a causal LM that it gives the same numbers as their own
    code; returns how many.

    That is tried on a small draft, layer by layer, in a pass that nothing else depends on.
    """
    library = native()
    device: Any = model.device
    if library is None or device.type != "cpu":
        return 0
    plans = Plans()
    trials = [
        _Trial(Block(library, layer, plans), layer)
        for layer in model.modules()
        if _like_llama(layer, library)
    ]
    if not trials:
        return 0
    try:
        for trial in trials:
            trial.layer.forward = trial
        _small_draft(model)
    finally:
        for trial in trials:
            del trial.layer.forward
    for trial in trials:
        if trial.same:
            trial.layer.forward = trial.block
    return sum(trial.same for trial in trials)


class _Trial:
    """Plays a layer in both ways and compares them."""

    def __init__(self, block: Block, layer: Any) -> None:
        self.block = block
        self.layer = layer
        self._agreed: list[bool] = []  # of each pass

    @property
    def same(self) -> bool:
        """Whether it was played, and always with the same result."""
        return bool(self._agreed) and all(self._agreed)

    def __call__(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        if options.get("attention_mask") is None or args or not _playable(hidden_states):
            return self.block.plain(hidden_states, *args, **options)
        played = self.block.play(hidden_states, **options)
        expected = self.block.plain(hidden_states, *args, **options)
        if isinstance(expected, Tensor):
            rounding = ROUNDING * hidden_states.abs().max()
            allowed = TOLERANCE * (expected - hidden_states).std() + rounding
            self._agreed.append(bool((played - expected).abs().max() <= allowed))
        return expected


def _small_draft(model: nn.Module) -> None:
    config: Any = model.config
    vocabulary = config.get_text_config().vocab_size
    runner = Runner(model, rows=2, max_length=32)
    runner.admit(2)
    runner.prefill(0, [[token % vocabulary for token in row] for row in ((3, 1, 4), (1, 5, 9))])
    runner.lengths = [3, 2]
    tokens = torch.tensor([[2, 6, 5, 3, 5], [8, 9, 7, 9, 3]]) % vocabulary
    runner.forward(tokens, keep=1, tree=Tree.uniform([0, 0, 1, 2], rows=2))


def _like_llama(layer: Any, library: Native) -> bool:
    """Whether a layer looks as if it were of the kind; that it is, only a trial tells."""
    if {name for name, _ in layer.named_children()} != CHILDREN:
        return False
    modules = dict(layer.named_modules())
    known = {"", "self_attn", "mlp", "mlp.act_fn", *PARTS, *NORMS, *HEAD_NORMS}
    if not {*PARTS, *NORMS} <= modules.keys() <= known or any(map(_hooked, modules.values())):
        return False
    linears: list[Any] = [modules[name] for name in PARTS]
    norms = [modules[name] for name in (*NORMS, *HEAD_NORMS) if name in modules]
    if not all(map(_takes, linears)) or {len(list(norm.parameters())) for norm in norms} != {1}:
        return False
    return _fits(layer, linears, norms, library)


def _fits(layer: Any, linears: Sequence[Any], norms: Sequence[Any], library: Native) -> bool:
    """Whether the numbers of a layer are such that the library can play it."""
    attention = layer.self_attn
    dim = getattr(attention, "head_dim", 0)
    if not dim or getattr(attention, "scaling", None) is None or None in map(_eps, norms):
        return False
    query, key, *_ = (linear.out_features for linear in linears)
    wholes = dim, linears[0].in_features, linears[4].out_features
    return (
        all(size % library.lanes == 0 for size in wholes)
        and len(set(map(_eps, norms))) == 1
        and {norm.weight.dtype for norm in norms} == {torch.float32}
        and [len(norm.weight) for norm in norms[2:]] in ([], [dim, dim])
        and query % key == 0
        and query // key <= MOST_EACH
    )


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _takes(linear: Any) -> bool:
    if type(linear) is nn.Linear:
        return linear.weight.dtype == torch.float32 and linear.weight.is_contiguous()
    return isinstance(linear, NativeLinear) and linear.weight.is_contiguous()


def _weight(linear: Any) -> Weight:
    if isinstance(linear, NativeLinear):
        return linear.told()
    return Weight(linear.weight, None, linear.bias)


def _has_head_norms(layer: Any) -> bool:
    return hasattr(layer.self_attn, "q_norm")


def _eps(norm: Any) -> float | None:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
