"""What a decoder layer computes, as `native.cpp` follows it: read from transformers' module.

Families differ in which norms there are and where, in the activation, in how heads are turned to
their positions, and in factors and bounds. What a module's attributes say is read, and what its
small functions compute is found out by calling them. A description is a guess until a trial has
shown that it gives the layer's numbers (`layer.use_native_layers`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outpace.targets.cpu.native import BLOCK, Native
from outpace.targets.cpu.native_layers.blocks import NativeBlockLinear
from outpace.targets.cpu.native_layers.experts import SHARED, Mixture, mixture_of
from outpace.targets.cpu.native_layers.latent import BOTH as BOTH_OF_LATENTS
from outpace.targets.cpu.native_layers.latent import Latent, latent_of
from outpace.targets.cpu.native_layers.probing import (
    NO_CLIP,
    SILU,
    Clip,
    Norm,
    activation_of,
    activation_of_experts,
    norm_of,
)
from outpace.targets.cpu.native_layers.product import Linear, outputs_of, weight_of
from outpace.targets.cpu.native_layers.recurrence import Recurrence, recurrence_of
from outpace.targets.cpu.weights.layers import hooks_of
from outpace.targets.hf.kinds import rope_entries

MOST_EACH = 64
"""Query heads that may share a key head."""

INPUT, POST_ATTENTION = "input_layernorm", "post_attention_layernorm"
POST_MLP = "post_feedforward_layernorm"
ARRANGEMENTS: Sequence[tuple[str | None, str | None, str | None, str | None]] = (
    (INPUT, None, POST_ATTENTION, None),  # Llama and most others
    (INPUT, POST_ATTENTION, "pre_feedforward_layernorm", POST_MLP),  # Gemma 2 and 3
    (None, POST_ATTENTION, None, POST_MLP),  # OLMo 2, EXAONE 4
    (INPUT, "post_self_attn_layernorm", POST_ATTENTION, "post_mlp_layernorm"),  # GLM 4
    (INPUT, None, INPUT, None),  # Cohere, Phi: the MLP is given what attention is given
    ("operator_norm", None, "ffn_norm", None),  # LFM2
)
"""The norms that a layer has: before and after attention, before and after the MLP. One name means
another place in another family, so that all of a layer's names tell which places they are."""

MIXERS = ("self_attn", "conv", "linear_attn", "mamba")
"""Attention, and what stands in its place in layers that keep a state."""
MLPS = ("mlp", "block_sparse_moe", "feed_forward")
SHARED_MLP = "shared_mlp"
"""Granite's, next to experts, or alone in a layer that has none."""
SINKS = "sinks"

HEAD_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))
"""The norms of queries and of keys."""
OUTPUT = ("o_proj", "dense", "out_proj")
GATE = ("gate_proj", "w1")
UP = ("up_proj", "c_fc", "fc1", "w3")
DOWN = ("down_proj", "c_proj", "fc2", "output_linear", "w2")
BOTH = ("gate_up_proj", "input_linear")
ACTIVATION = ("act_fn", "activation_fn", "act", "activation")

CONDITIONAL = ("clip_qkv", "attn_temperature_tuning")
"""What configurations call steps that change nothing in the few tokens of a trial."""


class Turning(IntEnum):
    """Which numbers of a head are turned together, by the numbers in `steps.h`."""

    STILL = 0
    """None: the layer knows no positions."""
    HALVES = 1
    PAIRS = 2
    """Neighbours, each with an angle of its own in the table, which are the same."""
    PAIRS_BY_HALVES = 3
    """Neighbours, whose angles are the first half of the table."""
    HALVES_ONCE = 4
    """Halves, where the table has an angle for two numbers."""
    PAIRS_APART = 5
    """As `PAIRS_BY_HALVES`; afterwards all first ones come before all second ones."""


OF_LATENTS = (Turning.PAIRS_APART, Turning.PAIRS_BY_HALVES, Turning.HALVES)
"""How those heads may be turned that see latents."""


@dataclass(frozen=True, eq=False)
class LayerDescription:
    """One decoder layer."""

    layer: Any
    attention: Any
    """Or what stands in its place."""
    linears: tuple[Linear | None, ...]
    """Queries, keys, values, output; gate (None where the MLP is not gated), up, down; and two
    more, None where there are no latents. With a mixture gate, up and down are of the MLP that all
    tokens meet, and may all be None. With latents the second makes these, and the third keys and
    values of them; the two more are what queries are made from, or None, and what makes keys, if
    the third makes values alone. What keeps a state has the output alone of the first four."""
    norms: tuple[Norm | None, ...]
    """Before and after attention, before and after the MLP, of queries, of keys; with latents of
    what queries are made from, and of latents."""
    parallel: bool
    """Whether the MLP is given what attention is given."""
    together: bool
    """Whether all heads are normalised together, not each by itself."""
    apart: int
    """Between the weights of the norms of two heads; 0 where they share them."""
    activation: int
    scaling: float
    cap: float
    """Soft bound of the scores; 0: they have none."""
    residual: float
    """By which is multiplied what is added to the residual stream."""
    mixture: Mixture | None = None
    latent: Latent | None = None
    recurrence: Recurrence | None = None
    clip: Clip = NO_CLIP
    turning: Turning = Turning.HALVES
    angles: int = 0
    """Which of the angles of a pass are its own."""
    mask: int = 0

    @property
    def dim(self) -> int:
        """Numbers of a value in the cache."""
        if self.recurrence is not None:
            return 0
        return int(self.attention.head_dim) if self.latent is None else self.latent.size

    @property
    def hidden(self) -> int:
        return self.made(3).outputs

    @property
    def width(self) -> int:
        """The inputs of the last product before the MLP."""
        return int(getattr(self.made(3).module, "in_features", 0))

    @property
    def heads(self) -> int:
        if self.recurrence is not None:
            return 0
        return self.width // self.dim if self.latent is None else self.latent.heads

    @property
    def gated_heads(self) -> bool:
        """Whether each query has the gate of its head's output after it (Qwen3-Next)."""
        keys = self.recurrence is None and self.latent is None
        return keys and self.made(0).outputs == 2 * self.width

    @property
    def knows_positions(self) -> bool:
        """Whether it turns heads to their positions."""
        return self.recurrence is None and self.turning is not Turning.STILL

    @property
    def groups(self) -> int:
        """Groups of heads that go through the slots together."""
        if self.recurrence is not None:
            return 0
        if self.latent is not None:
            return self.heads // self.latent.each
        return self.made(1).outputs // self.dim

    @property
    def cached(self) -> tuple[int, int, int]:
        """Heads in the cache, and the numbers of a key and of a value there."""
        if self.latent is None:
            return self.groups, self.dim, self.dim
        return 1, self.latent.size, self.latent.rope

    def made(self, number: int) -> Linear:
        """Returns one of the first four linear layers."""
        found = self.linears[number]
        assert found is not None
        return found

    @property
    def modules(self) -> list[Any]:
        """The modules whose weights the library reads."""
        linears = [linear.module for linear in self.linears if linear is not None]
        for part in (self.recurrence, self.mixture):
            linears += [] if part is None else part.modules
        return [*linears, *(norm.module for norm in self.norms if norm is not None)]

    @property
    def sinks(self) -> Tensor | None:
        """The score of each head for a slot without values that all tokens see."""
        found: Tensor | None = self.attention._parameters.get(SINKS)
        return found

    @property
    def inside(self) -> list[Any]:
        """The other modules that are a part of what the library computes."""
        found = [] if self.mixture is None else [*self.mixture.experts.modules()]
        found += [] if self.recurrence is None else self.recurrence.inside
        both = getattr(self.attention, BOTH_OF_LATENTS, None)
        return found if both is None else [*found, both]

    @property
    def others(self) -> list[tuple[Any, str]]:
        """Where the layer keeps further numbers that the library reads."""
        found = [(self.attention._parameters, SINKS)] if self.sinks is not None else []
        found += [] if self.recurrence is None else self.recurrence.numbers
        if self.mixture is not None and self.mixture.held is not None:
            found.append(self.mixture.held)
        return found

    def candidates(self) -> Iterator[LayerDescription]:
        """Yields descriptions of which one at most gives the layer's numbers: its attributes do not
        say how heads are turned."""
        if self.recurrence is not None:
            yield self
            return
        usual = [each for each in Turning if each not in (Turning.HALVES, Turning.PAIRS_APART)]
        for turning in (Turning.HALVES, *usual) if self.latent is None else OF_LATENTS:
            yield replace(self, turning=turning)


def description_of(layer: Any, library: Native) -> LayerDescription | None:
    """Returns what a module may compute if it is a decoder layer of a known kind; None for others.
    Only a trial can show that it does."""
    parts = dict(layer.named_children())
    mixers = [parts.pop(name) for name in MIXERS if name in parts]
    mlps = [parts.pop(name) for name in MLPS if name in parts] or [parts.pop(SHARED_MLP, None)]
    if (len(mixers), len(mlps)) != (1, 1) or mlps == [None] or "forward" in layer.__dict__:
        return None
    (attention,), (mlp,) = mixers, mlps
    if not type(layer).__module__.startswith("transformers."):
        return None  # what a trial does not show of transformers' own layers is known
    if any(any(hooks_of(module)) for module in layer.modules()) or _is_conditional(attention):
        return None
    mixture = mixture_of(mlp, library.lanes)
    shared: Any = mlp if mixture is None else parts.pop(SHARED_MLP, _child(mlp, SHARED))
    heads, inner = _attention_parts(attention, library), _mlp_linears(shared, mixture)
    around = _norms_around(parts)
    activation, clip = _activation_of(shared), NO_CLIP
    if mixture is not None:
        activation, clip = activation_of_experts(mixture.experts, activation, alone=shared is None)
    if heads is None or inner is None or around is None or activation is None:
        return None
    query_norm = heads.norms[0] if heads.latent is None else None
    shape = () if query_norm is None else tuple(query_norm.module.weight.shape)
    width = getattr(heads.linears[3].module, "in_features", 0)
    found = LayerDescription(
        layer=layer,
        attention=attention,
        linears=(*heads.linears, *inner, *heads.more),
        norms=(*around, *heads.norms),
        parallel=around[0] is not None and around[0] is around[2],
        together=len(shape) == 1 and shape[0] == width != attention.head_dim,
        apart=attention.head_dim if len(shape) == 2 else 0,
        activation=activation,
        mixture=mixture,
        latent=heads.latent,
        recurrence=heads.recurrence,
        clip=clip,
        scaling=float(getattr(attention, "scaling", 1.0)),
        cap=float(getattr(attention, "attn_logit_softcapping", None) or 0.0),
        residual=float(getattr(layer, "residual_multiplier", 1.0)),
    )
    return found if _fits(found, library) and _is_all(found, mlp, shared) else None


def _is_conditional(attention: Any) -> bool:
    """Whether attention does what the few tokens of a trial do not show. Queries of Ministral 3
    grow from a position on."""
    config = getattr(attention, "config", None)
    asked = [getattr(config, name, None) for name in CONDITIONAL]
    return any(asked) or any(each.get("llama_4_scaling_beta") for each in rope_entries(config))


def _norms_around(parts: Mapping[str, nn.Module]) -> tuple[Norm | None, ...] | None:
    """Returns the norms before and after attention and the MLP, from the other parts of a layer;
    the same one twice where both are given the same."""
    names = {name for name, part in parts.items() if type(part) is not nn.Dropout}
    places = next((row for row in ARRANGEMENTS if {*row} - {None} == names), None)
    norms = {name: norm_of(parts[name]) for name in names}
    if places is None or None in norms.values():
        return None
    return tuple(None if name is None else norms[name] for name in places)


class _AttentionParts(NamedTuple):
    """What attention consists of."""

    linears: tuple[Linear | None, Linear | None, Linear | None, Linear]
    norms: tuple[Norm | None, Norm | None] = (None, None)
    more: tuple[Linear | None, Linear | None] = (None, None)
    latent: Latent | None = None
    recurrence: Recurrence | None = None


def _attention_parts(attention: Any, library: Native) -> _AttentionParts | None:
    """Returns what attention consists of, or what keeps a state in its place; None where it is of
    an unknown kind."""
    recurrence = recurrence_of(attention, library.lanes)
    if recurrence is not None:
        output = _child(attention, OUTPUT)
        last = Linear(output, 0, outputs_of(output))
        return _AttentionParts((None, None, None, last), recurrence=recurrence)
    found = latent_of(attention)
    if found is None:
        linears, norms = _attention_linears(attention), _norms_of_heads(attention)
        return None if linears is None or norms is None else _AttentionParts(linears, norms)
    four = (found.query, found.latent, found.values, found.output)
    query, latent, values, output = (Linear(each, 0, outputs_of(each)) for each in four)
    first, keys = (
        None if each is None else Linear(each, 0, outputs_of(each))
        for each in (found.first, found.keys)
    )
    norms = found.query_norm, found.latent_norm
    return _AttentionParts((query, latent, values, output), norms, (first, keys), found.sizes)


def _norms_of_heads(attention: Any) -> tuple[Norm | None, Norm | None] | None:
    """Returns the norms of queries and of keys; None where these are of an unknown kind."""
    for names in HEAD_NORMS:
        found = [getattr(attention, name, None) for name in names]
        if any(module is not None for module in found):
            query, key = map(norm_of, found)
            return None if query is None or key is None else (query, key)
    return None, None


def _activation_of(mlp: Any) -> int | None:
    """Returns the number of an MLP's activation. LFM2's has no module for it."""
    module = _child(mlp, ACTIVATION)
    return SILU if module is None and _child(mlp, ("w1",)) is not None else activation_of(module)


def _attention_linears(attention: Any) -> tuple[Linear, Linear, Linear, Linear] | None:
    """Returns queries, keys, values and output."""
    output, whole = _child(attention, OUTPUT), _child(attention, ("qkv_proj",))
    dim, each = getattr(attention, "head_dim", 0), getattr(attention, "num_key_value_groups", 1)
    if output is None or not dim or getattr(attention, "scaling", None) is None:
        return None
    last = Linear(output, 0, outputs_of(output))
    if whole is not None:
        narrow = outputs_of(whole) // (each + 2)
        wide = each * narrow
        keys, values = Linear(whole, wide, narrow), Linear(whole, wide + narrow, narrow)
        return Linear(whole, 0, wide), keys, values, last
    query, key, value = (_child(attention, (name,)) for name in ("q_proj", "k_proj", "v_proj"))
    if query is None or key is None or value is None:
        return None
    queries, keys, values = (Linear(each, 0, outputs_of(each)) for each in (query, key, value))
    return queries, keys, values, last


def _mlp_linears(
    mlp: Any, mixture: Mixture | None
) -> tuple[Linear | None, Linear | None, Linear | None] | None:
    """Returns gate, up and down; None for each where there is a mixture alone."""
    if mlp is None and mixture is not None:
        return None, None, None
    down, both = _child(mlp, DOWN), _child(mlp, BOTH)
    up, gate = _child(mlp, UP), _child(mlp, GATE)
    if down is None or (up is None) == (both is None):
        return None
    last = Linear(down, 0, outputs_of(down))
    if both is not None:
        half = outputs_of(both) // 2
        return Linear(both, 0, half), Linear(both, half, half), last
    first = None if gate is None else Linear(gate, 0, outputs_of(gate))
    return first, Linear(up, 0, outputs_of(up)), last


def _child(module: Any, names: Sequence[str]) -> Any:
    if module is None:
        return None
    return next((child for name, child in module.named_children() if name in names), None)


def _is_all(found: LayerDescription, mlp: Any, shared: Any) -> bool:
    """Whether a layer has no other modules than a description names, besides some without weights,
    and no numbers of its own (scales): one with others computes something else."""
    own = [each for each in (found.layer, found.attention, mlp, shared) if each is not None]
    known = {*own, _child(own[-1], ACTIVATION), *found.modules, *found.inside}
    left = [module for module in found.layer.modules() if module not in known]
    numbers = [each for part in own for each in (*part.parameters(False), *part.buffers(False))]
    known_numbers = {id(held[name]) for held, name in found.others}
    return {*map(id, numbers)} <= known_numbers and all(
        type(module) is nn.Dropout for module in left
    )


def _fits(found: LayerDescription, library: Native) -> bool:
    """Whether the library can compute a layer of these sizes and dtypes: it makes room for these
    shapes, and for nothing wider."""
    gate, up, down = found.linears[4:7]
    if not all(linear is None or linear.fits for linear in found.linears):
        return False
    hidden, inner = found.hidden, 0 if up is None else up.outputs
    return (
        all(
            linear is None or linear.module.in_features == size
            for linear, size in zip(found.linears, _input_sizes(found, inner), strict=True)
        )
        and all(linear is None or linear.outputs == hidden for linear in (found.made(3), down))
        and (found.mixture is None or _fits_mixture(found))
        and (found.sinks is None or _is_vector(found.sinks, found.heads))
        and (gate is None or gate.outputs == inner)
        and all(size % library.lanes == 0 for size in (hidden, inner))
        and _fits_attention(found, library)
        and all(
            norm is None or norm.module.weight.numel() == size
            for norm, size in zip(found.norms, _norm_sizes(found), strict=True)
        )
    )


def _input_sizes(found: LayerDescription, inner: int) -> list[int]:
    """The inputs of each linear layer."""
    hidden, latent, first = found.hidden, found.latent, found.linears[7]
    if latent is None:
        heads = [hidden, hidden, hidden, found.width]
    else:
        from_ = hidden if first is None else first.outputs
        heads = [from_, hidden, latent.size, latent.heads * latent.value]
    return [*heads, hidden, hidden, inner, hidden, 0 if latent is None else latent.nope]


def _fits_attention(found: LayerDescription, library: Native) -> bool:
    """Whether attention, or what keeps a state in its place, is as the library knows it."""
    if found.recurrence is not None:
        inputs = {linear.module.in_features for linear in found.recurrence.parts}
        return inputs == {found.hidden} and found.recurrence.width == found.width
    return (_fits_heads if found.latent is None else _fits_latents)(found, library)


def _fits_heads(found: LayerDescription, library: Native) -> bool:
    """Whether queries, keys and values are of heads as the library knows them."""
    query, key, value = (found.made(number).outputs for number in range(3))
    return (
        query == (2 * found.width if found.gated_heads else found.width)
        and not (found.gated_heads and found.together)
        and found.dim % library.lanes == 0
        and key == value
        and key % found.dim == 0
        and found.width % key == 0
        and found.width // key <= MOST_EACH
    )


def _fits_latents(found: LayerDescription, library: Native) -> bool:
    """The same where heads see latents."""
    query, key, value = (found.made(number) for number in range(3))
    latent, (first, keys) = found.latent, found.linears[7:]
    assert latent is not None
    # What the parts of a head begin with, they begin a panel with.
    parts = [(value, latent.value), *([(value, latent.nope)] if keys is None else [])]
    parts += [] if keys is None else [(keys, latent.size)]
    held = [(weight_of(linear.module), size) for linear, size in parts]
    return (
        latent.fits(library.lanes)
        and query.outputs == latent.heads * latent.query
        and key.outputs == latent.size + latent.rope
        and value.outputs == sum(size for linear, size in parts if linear is value) * latent.heads
        and (keys is None or keys.outputs == latent.heads * latent.size)
        and all(weight.bias is None and size % weight.panel == 0 for weight, size in held)
        and (first is None or first.outputs % library.lanes == 0)
        # The transposed product of blocks writes whole ones.
        and (not isinstance(value.module, NativeBlockLinear) or latent.size % BLOCK == 0)
    )


def _fits_mixture(found: LayerDescription) -> bool:
    """Whether a mixture is of the layer's size, and the MLP that all tokens meet of its kind."""
    assert found.mixture is not None
    shared = found.linears[4:7]
    alike = all(each is not None and isinstance(each.module, NativeBlockLinear) for each in shared)
    return found.mixture.experts.hidden_dim == found.hidden and (alike or shared == (None,) * 3)


def _is_vector(numbers: Tensor, size: int) -> bool:
    return numbers.shape == (size,) and numbers.dtype == torch.float32 and numbers.is_contiguous()


def _norm_sizes(found: LayerDescription) -> list[int]:
    """The weights that the library reads of each norm."""
    if found.latent is not None:
        first = found.linears[7]
        return [found.hidden] * 4 + [0 if first is None else first.outputs, found.latent.size]
    if found.recurrence is not None:
        return [found.hidden] * 4 + [0, 0]
    of_heads = [found.width, found.made(1).outputs]
    alone = not (found.together or found.apart)
    return [found.hidden] * 4 + ([found.dim] * 2 if alone else of_heads)


def kinds_of(config: Any, layers: int) -> Mapping[str, int]:
    """Returns the types of layers that a configuration lists, each with its number."""
    types: Sequence[str] = getattr(config, "layer_types", None) or ()
    return {name: number for number, name in enumerate(dict.fromkeys(types[:layers]))}
