"""Decoder layers computed by our own code (`forward.h`), in passes over a few tokens."""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outpace.targets.base import NO_SUBLAYERS, SubLayers
from outpace.targets.cpu.native import NO_LOGITS, NO_STATES, LogitsOutput, Native, StatesOutput
from outpace.targets.cpu.native_layers.blocks import NativeBlockLinear
from outpace.targets.cpu.native_layers.description import LayerDescription
from outpace.targets.cpu.native_layers.experts import MixtureStruct
from outpace.targets.cpu.native_layers.latent import LatentStruct
from outpace.targets.cpu.native_layers.linear import INVARIANT_ROWS
from outpace.targets.cpu.native_layers.pass_states import NO_STATE_POINTERS, PassStates
from outpace.targets.cpu.native_layers.passes import PassDescriptions, PassInputs
from outpace.targets.cpu.native_layers.probing import Norm, NormStruct
from outpace.targets.cpu.native_layers.product import (
    NativeProduct,
    SubsetHead,
    side_by_side,
    weight_of,
)
from outpace.targets.cpu.native_layers.recurrence import RecurrenceStruct
from outpace.targets.cpu.weights.layers import hooks_of
from outpace.targets.cpu.weights.weight import LinearStruct, Weight, first_outputs, linear_struct
from outpace.targets.hf.cache import SlotCache
from outpace.targets.hf.logits import LogitScaling, VocabularySubset
from outpace.targets.hf.recurrent.states import StateCache

CAPTURING = "transformers.utils.output_capturing"
"""Where transformers' hooks come from that collect hidden states and attentions."""


class _Layer(ctypes.Structure):
    """`Layer` of `layer.h`, field by field."""

    _fields_ = (
        *(
            (name, LinearStruct)
            for name in ("query", "key", "value", "output", "gate", "up", "down")
        ),
        *((name, LinearStruct) for name in ("query_a", "key_b")),
        *((name, NormStruct) for name in ("before_attention", "after_attention")),
        *((name, NormStruct) for name in ("before_mlp", "after_mlp", "query_norm", "key_norm")),
        ("embedding_norm", NormStruct),
        *((name, ctypes.c_int64) for name in ("hidden", "heads", "kv_heads", "dim", "inner")),
        *((name, ctypes.c_int64) for name in ("has_attention", "has_mlp", "reads_embeddings")),
        ("parallel", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in ("norm_over_heads", "norm_stride")),
        *((name, ctypes.c_int64) for name in ("activation", "rotary", "gated_heads")),
        *((name, ctypes.c_int64) for name in ("angles", "mask")),
        *((name, ctypes.c_float) for name in ("scaling", "cap", "residual_multiplier")),
        *((name, ctypes.c_float) for name in ("alpha", "limit")),
        ("sinks", ctypes.c_void_p),
        ("mixture", MixtureStruct),
        ("latent", LatentStruct),
        ("recurrence", RecurrenceStruct),
    )


class _Cache(ctypes.Structure):
    """`KVCache` of `kv_cache.h`, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "key_scales", "value_scales")),
        ("kind", ctypes.c_int64),
    )


class ModelHead(NamedTuple):
    """What comes after the last layer of a model."""

    norm: Norm
    head: Any
    """The module that makes its logits."""
    scaling: LogitScaling


BIAS_OF = methodcaller("get", "bias")
"""What finds a bias among a module's parameters; None where it has none."""


class LayerStack:
    """Layers that follow one another."""

    def __init__(
        self,
        library: Native,
        layers: Sequence[LayerDescription],
        passes: PassDescriptions,
        ends: ModelHead | None = None,
        skipped: SubLayers = NO_SUBLAYERS,
    ) -> None:
        """passes: shared by all stacks of one model. ends: what comes after the last layer, if the
        stack ends the model. skipped: the parts that are left out, by the layers' numbers in the
        model."""
        self._library = library
        self._layers = list(layers)
        self._skipped = skipped
        left_out = skipped.attention
        self._keeping = [
            None if layer.attention.layer_idx in left_out else layer.recurrence for layer in layers
        ]
        self._passes = passes
        self._norm = None if ends is None else ends.norm
        self._head: Any = None if ends is None or not takes_head(ends.head) else ends.head
        self._scaling = LogitScaling() if ends is None else ends.scaling
        modules = [module for layer in layers for module in layer.modules]
        rounds = any(isinstance(module, NativeBlockLinear) for module in modules)
        self.most = sys.maxsize if rounds else INVARIANT_ROWS
        """Tokens of a pass, at most. Longer prompts are left to transformers' layers, but not where
        activations are rounded: there a last bit of theirs could decide which way one is rounded,
        and a token would not be the same alone and in a long prompt or a large batch."""
        norm = None if self._norm is None else self._norm.module
        last: list[Any] = [module for module in (norm, self._head) if module is not None]
        # Dictionaries of parameters: asking a module for one takes three times as long.
        self._weights: list[tuple[Any, str]] = [
            module.place() if isinstance(module, NativeProduct) else (module._parameters, "weight")
            for module in (*modules, *last)
        ]
        self._weights += [place for layer in layers for place in layer.others]
        self._biased: list[Any] = [module._parameters for module in (*modules, *last)]
        outside = [layer.layer for layer in layers]
        inside = [part for layer in outside for part in layer.modules() if part is not layer]
        self._inside = _Hooks([*inside, *last])
        self._outside = _Hooks(outside)
        self._last_description: _StackDescription | None = None
        self._last_pointers: _CachePointers | None = None
        self._last_subset: SubsetHead | None = None

    @property
    def has_foreign_hooks(self) -> bool:
        """Whether somebody has hooked a module since, whose own code must run then."""
        return self._outside.are_others() or self._inside.are_others()

    @property
    def has_inner_hooks(self) -> bool:
        """The same, of parts of the layers: hooks on a whole layer run around any code for it."""
        return self._inside.are_others()

    @property
    def has_head(self) -> bool:
        """Whether it can compute logits."""
        return self._head is not None

    def run(self, given: PassInputs) -> None:
        """Replaces the hidden states of a pass by the output of the last layer."""
        description = self._description()
        states = self._states(given)
        for rows, some in given.in_parts():
            self._run(description, some, NO_LOGITS, states, rows.start)

    def logits(
        self, given: PassInputs, keep: int, subset: VocabularySubset | None = None
    ) -> Tensor:
        """Returns the logits of each row's last tokens, ``[A, keep, V]``, where it `has_head`.
        subset: as for `NativeModel`."""
        description = self._description()
        assert description.head is not None
        head = description.head if subset is None else first_outputs(description.head, subset.first)
        others = self._subset_head(subset.others) if subset is not None and subset.others else None
        heads = (
            (LinearStruct * 1)(head) if others is None else (LinearStruct * 2)(head, others.struct)
        )
        found = given.x.new_empty(len(given.x), keep, sum(each.outputs for each in heads))
        states = self._states(given)
        for rows, some in given.in_parts():
            logits = found[rows]
            ending = LogitsOutput(heads, len(heads), logits.data_ptr(), keep, self._scaling)
            self._run(description, some, ending, states, rows.start)
            if others is not None:
                side_by_side(logits, head.outputs)
        return found if others is None else others.spread(found, head.outputs)

    def _subset_head(self, tokens: tuple[int, ...]) -> SubsetHead:
        """What computes the logits of some tokens; the same ones come again and again."""
        last = self._last_subset
        if last is None or not last.are(tokens, self._head):
            last = self._last_subset = SubsetHead.of(tokens, self._head)
        return last

    def _states(self, given: PassInputs) -> PassStates | None:
        """The states that layers go on from, and those that they will have made; None where no
        layer keeps any."""
        if not any(self._keeping):
            return None
        assert isinstance(given.cache, StateCache)
        return PassStates(given.cache, self._keeping, given.x.shape[1])

    def _run(
        self,
        description: _StackDescription,
        given: PassInputs,
        ending: LogitsOutput,
        states: PassStates | None,
        first: int,
    ) -> None:
        """first: the pass's row that is the first of these."""
        pointers = self._pointers_into(given.cache, description, given.x)
        slots = given.slots
        size = slots.rows, slots.columns, slots.view
        scratch = self._library.scratch(description.layers, *size, description.threads)
        current = self._passes.of(given, pointers.slots, scratch)
        left = given.states
        self._library.layers(
            description.layers,
            current.struct,
            given.x,
            cache=pointers.struct,
            reading=NO_STATE_POINTERS if states is None else states.of_rows(first),
            norm=description.norm,
            threads=description.threads,
            ending=ending,
            states=NO_STATES if left is None else StatesOutput(left.data_ptr(), left.stride(0)),
        )

    def _pointers_into(
        self, cache: SlotCache, description: _StackDescription, x: Tensor
    ) -> _CachePointers:
        """Returns where the layers' keys and values are, looked up again if the cache is another
        one or has exchanged its buffers."""
        found = self._last_pointers
        if found is None or found.cache() is not cache or found.generation != cache.generation:
            layers = [
                self._buffers_of(cache, index, layer, x) if layer.recurrence is None else None
                for index, layer in zip(description.indices, self._layers, strict=True)
            ]
            attending = [layer for layer in layers if layer is not None]
            names = ("keys", "values", "key_scales", "value_scales")
            arrays = [_pointers([getattr(each, name, None) for each in layers]) for name in names]
            kind = 0 if cache.bits is None else cache.bits.number
            found = self._last_pointers = _CachePointers(
                struct=_Cache(*map(ctypes.addressof, arrays), kind),
                arrays=arrays,
                slots=attending[0].keys.shape[1] if attending else 0,
                cache=weakref.ref(cache),
                generation=cache.generation,
            )
        return found

    def _buffers_of(self, cache: SlotCache, index: int, layer: LayerDescription, x: Tensor) -> Any:
        """Returns what has the keys and values of a layer."""
        return cache.buffers_of(index, *layer.cached, like=x)

    def _description(self) -> _StackDescription:
        """Returns the layers as the library reads them, described again if a weight has moved."""
        pointers = [parameters[name].data_ptr() for parameters, name in self._weights]
        biases = map(BIAS_OF, self._biased)
        pointers += [0 if bias is None else bias.data_ptr() for bias in biases]
        threads = torch.get_num_threads()
        found = self._last_description
        if found is None or found.pointers != pointers or found.threads != threads:
            found = self._last_description = self._describe(pointers, threads)
        return found

    def _describe(self, pointers: list[int], threads: int) -> _StackDescription:
        weights = [
            [None if linear is None else linear.weight() for linear in layer.linears]
            for layer in self._layers
        ]
        experts = [
            {} if layer.mixture is None else {id(m): weight_of(m) for m in layer.mixture.modules}
            for layer in self._layers
        ]
        parts = [
            [] if keeps is None else [linear.weight() for linear in keeps.products]
            for keeps in (layer.recurrence for layer in self._layers)
        ]
        described = zip(self._layers, weights, experts, parts, strict=True)
        layers = (_Layer * len(weights))(*(_struct(*each, self._skipped) for each in described))
        head = None if self._head is None else weight_of(self._head)
        return _StackDescription(
            layers=layers,
            indices=[layer.attention.layer_idx for layer in self._layers],
            norm=None if self._norm is None else self._norm.struct(),
            head=None if head is None else linear_struct(head),
            threads=threads,
            pointers=pointers,
            alive=(weights, experts, parts, head),
        )


def _struct(
    layer: LayerDescription,
    weights: Sequence[Weight | None],
    experts: dict[int, Weight],
    recurring: Sequence[Weight],
    skipped: SubLayers,
) -> _Layer:
    """Returns a layer as the library reads it. experts: the weights of its mixture, by module.
    recurring: those of the products of what keeps a state."""
    sinks, mixture, recurrence = layer.sinks, layer.mixture, layer.recurrence
    parts = [LinearStruct() if weight is None else linear_struct(weight) for weight in weights]
    norms = [
        NormStruct() if norm is None else norm.struct()
        for norm in (*layer.norms, layer.embedding_norm)
    ]
    number, latent = layer.attention.layer_idx, layer.latent
    return _Layer(
        *parts,
        *norms,
        *(layer.hidden, layer.heads, layer.kv_heads, layer.dim, parts[5].outputs),
        *(number not in skipped.attention, number not in skipped.mlp, layer.reads_embeddings),
        *(layer.parallel, layer.norm_over_heads, layer.norm_stride),
        *(layer.activation, layer.rotary, layer.gated_heads, layer.angles, layer.mask),
        *(layer.scaling, layer.softcap, layer.residual_multiplier, *layer.clip),
        None if sinks is None else sinks.data_ptr(),
        MixtureStruct() if mixture is None else mixture.struct(experts),
        LatentStruct() if latent is None else latent.struct(),
        RecurrenceStruct() if recurrence is None else recurrence.struct(recurring),
    )


class _Hooks:
    """The hooks on some modules."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._all = [hooks for module in modules for hooks in hooks_of(module)]
        self._harmless: list[int] = []

    def are_others(self) -> bool:
        """Whether somebody but transformers has hooked a module. It leaves hooks behind, for good,
        in a model that was once asked for its hidden states; they do nothing while its own code
        does not run."""
        if not any(self._all):
            return False
        # Numbers of hooks are never used twice.
        numbers = list(chain.from_iterable(self._all))
        if numbers == self._harmless:
            return False
        found = (hook for hooks in self._all for hook in hooks.values())
        if any(getattr(hook, "__module__", None) != CAPTURING for hook in found):
            return True
        self._harmless = numbers
        return False


@dataclass(frozen=True)
class _StackDescription:
    """The layers of a stack, as the library reads them."""

    layers: ctypes.Array[_Layer]
    indices: list[int]  # of the layers, in the cache
    norm: NormStruct | None  # after the last layer
    head: LinearStruct | None
    threads: int
    pointers: list[int]  # to all weights and biases, when they were described
    alive: tuple[Any, ...]  # the weights


@dataclass(frozen=True)
class _CachePointers:
    """Where the buffers of a cache were found."""

    struct: _Cache
    arrays: list[ctypes.Array[ctypes.c_void_p]]  # what it points to, by layer
    slots: int  # of each head
    cache: weakref.ref[SlotCache]
    generation: int  # of the cache's buffers


def _pointers(buffers: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    found = [None if buffer is None else buffer.data_ptr() for buffer in buffers]
    return (ctypes.c_void_p * len(found))(*found)


def can_run(x: Tensor, most: int = INVARIANT_ROWS) -> bool:
    """Whether a `LayerStack` takes these hidden states ``[A, T, hidden]``."""
    plain = x.dtype == torch.float32 and x.device.type == "cpu" and not torch.is_grad_enabled()
    return few(x, most) and plain


def few(tokens: Tensor, most: int) -> bool:
    """Whether a pass over tokens ``[A, T, ...]`` is small enough for a `LayerStack`."""
    return 0 < tokens.shape[0] * tokens.shape[1] <= most and not torch.compiler.is_compiling()


def takes_head(head: Any) -> bool:
    """Whether a `LayerStack` can end in this module, the one that makes a model's logits."""
    return isinstance(head, NativeProduct) and head.as_weight().matrix.is_contiguous()
