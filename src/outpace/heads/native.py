"""Decoder layers of heads, computed by our own code as those of targets are.

In torch a layer launches some fifty small operations besides its products, and launching them takes
longer than computing them. Here layers that follow one another are one call, which writes keys and
values into the slots of a cache itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from outpace.heads.decoder import DecoderLayer, FeedForward, MidLayer, NormedLayer
from outpace.heads.layers import Attention, AttentionContext, KeyValues, Rotary
from outpace.targets.cpu.native import Native, native
from outpace.targets.cpu.native_layers.description import LayerDescription
from outpace.targets.cpu.native_layers.fitting import fits
from outpace.targets.cpu.native_layers.layer import ModuleGuard
from outpace.targets.cpu.native_layers.passes import Angles, PassDescriptions, PassInputs
from outpace.targets.cpu.native_layers.probing import SILU, Norm, is_plain, norm_of
from outpace.targets.cpu.native_layers.product import Linear
from outpace.targets.cpu.native_layers.stack import LayerStack, ModelHead
from outpace.targets.hf.attention import apply_window
from outpace.targets.hf.cache import SlotCache
from outpace.targets.hf.logits import LogitScaling
from outpace.targets.hf.slot_ranges import PassSlots


class WrittenKeyValues(KeyValues):
    """Entries that a pass has written into the slots of a cache; they are not shown."""


@dataclass(frozen=True, eq=False)
class SlotAttentionContext(AttentionContext):
    """Where W entries of B rows stand, in a pass that writes them into slots.

    ``visible``: bool ``[B, W, view]``, by slot. ``before``: nothing.
    """

    native: NativeLayers
    cache: SlotCache
    slots: PassSlots

    def through(
        self, layers: Sequence[nn.Module], x: Tensor, embeddings: Tensor | None = None
    ) -> tuple[Tensor, KeyValues]:
        assert self.native.computes(layers), "the cache holds entries of other layers"
        found = self.native.run(x, self, embeddings)
        return found, WrittenKeyValues(self.before.keys, self.before.values)


class NativeLayers:
    """Layers of a head that follow one another."""

    def __init__(self, library: Native, layers: Sequence[Any], described: _Described) -> None:
        self._layers, self._first = list(layers), layers[0]
        inside = [module for layer in layers for module in layer.modules()]
        self._unchanged = ModuleGuard(inside, inside)
        self._windows = described.windows
        self._rotary: Rotary = layers[0].self_attn.rotary
        self._stack = _HeadStack(library, described.layers, PassDescriptions(), described.end)

    @classmethod
    def of(cls, layers: Sequence[nn.Module]) -> NativeLayers | None:
        """Returns what computes layers; None where our own code cannot."""
        library = native()
        described = None if library is None or not layers else _described(layers, library)
        if library is None or described is None:
            return None
        return cls(library, layers, described)

    def computes(self, layers: Sequence[nn.Module]) -> bool:
        """Returns whether these are its layers."""
        return list(layers) == self._layers

    def takes(self, tokens: int) -> bool:
        """Returns whether it computes a pass over this many tokens, and the layers are as they
        were: nobody has hooked them, exchanged a part of them, or made them of another dtype."""
        few = 0 < tokens <= self._stack.most
        numbers = self._first.post_attention_layernorm.weight
        plain = is_plain(numbers) and numbers.device.type == "cpu"
        free = not (torch.is_grad_enabled() or self._stack.has_foreign_hooks)
        return few and plain and free and bool(self._unchanged)

    def run(
        self, x: Tensor, attn_context: SlotAttentionContext, embeddings: Tensor | None
    ) -> Tensor:
        """Returns what the layers make of states ``[B, W, H]``; keys and values go into slots.
        embeddings: as for `AttentionContext.through`."""
        first = self._first
        if isinstance(first, MidLayer) and first.norm_first:
            x = first.hidden_norm(x)
        y = torch.empty(x.shape, dtype=torch.float32).copy_(x)
        cosines, sines = self._rotary.table(attn_context.slots.view, y.dtype)
        given = PassInputs(
            x=y,
            angles=(Angles(cosines, sines, attn_context.positions.contiguous()),),
            cache=attn_context.cache,
            slots=attn_context.slots,
            masks=tuple(
                apply_window(attn_context.visible, window)[:, None] for window in self._windows
            ),
            embeddings=None if embeddings is None else embeddings.float().contiguous(),
        )
        self._stack.run(given)
        return y


class _HeadStack(LayerStack):
    """Layers whose keys and values lie side by side in one layer of a cache, as groups of one."""

    def _buffers_of(self, cache: SlotCache, place: int, layer: LayerDescription, x: Tensor) -> Any:
        all_layers, count = cache.layers[0], layer.kv_heads
        groups = slice(place * count, (place + 1) * count)
        return SimpleNamespace(keys=all_layers.keys[groups], values=all_layers.values[groups])


@dataclass(frozen=True, eq=False)
class _Described:
    """Layers, as our own code follows them."""

    layers: list[LayerDescription]
    windows: list[int]
    """By the numbers of the layers' masks."""
    end: ModelHead | None
    """The norm after the last layer, if there is one."""


KINDS = (DecoderLayer, NormedLayer, MidLayer)
"""Layers that are known: those of other classes compute something else."""


def _described(layers: Sequence[Any], library: Native) -> _Described | None:
    if not all(type(each) in KINDS and _has_known_parts(each) for each in layers):
        return None
    if any(type(each) is not DecoderLayer for each in layers[1:]):  # `MidLayer` comes first
        return None
    if type(layers[0]) is NormedLayer and len(layers) > 1:  # its norm comes last
        return None
    windows = list(dict.fromkeys(each.self_attn.window for each in layers))
    found = [_description(each, windows.index(each.self_attn.window)) for each in layers]
    if not all(each is not None and fits(each, library) for each in found):
        return None
    end = norm_of(layers[0].norm) if type(layers[0]) is NormedLayer else None
    for number, each in enumerate(layers):
        each.self_attn.layer_idx = number
    return _Described(
        [each for each in found if each is not None],
        windows,
        None if end is None else ModelHead(end, None, LogitScaling()),
    )


def _has_known_parts(layer: Any) -> bool:
    return type(layer.self_attn) is Attention and type(layer.mlp) is FeedForward


def _description(layer: Any, mask: int) -> LayerDescription | None:
    """Returns what a layer computes; None where one of its norms is of an unknown kind."""
    attention, mlp = layer.self_attn, layer.mlp
    first = isinstance(layer, MidLayer)
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    before, of_embeddings = layer.input_layernorm, None
    if first:
        before, of_embeddings = (None if layer.norm_first else layer.hidden_norm), before
    after = layer.post_attention_layernorm
    modules = [before, None, after, None, attention.q_norm, attention.k_norm, of_embeddings]
    norms: list[Norm | None] = [None if each is None else norm_of(each) for each in modules]
    if any(each is not None and norm is None for each, norm in zip(modules, norms, strict=True)):
        return None
    scale = attention.scale
    return LayerDescription(
        layer=layer,
        attention=attention,
        linears=(*(Linear(each, 0, each.out_features) for each in linears), None, None),
        norms=tuple(norms[:6]),
        parallel=False,
        norm_over_heads=False,
        norm_stride=0,
        activation=SILU,
        scaling=attention.head_dim**-0.5 if scale is None else scale,
        softcap=0.0,
        residual_multiplier=1.0,
        reads_embeddings=first,
        embedding_norm=norms[6],
        mask=mask,
    )
