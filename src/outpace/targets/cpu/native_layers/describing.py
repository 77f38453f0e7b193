"""Reads from transformers' module what a decoder layer computes.

Families differ in which norms there are and where, in the activation, in how heads are rotated to
their positions, and in factors and bounds. What a module's attributes say is read, and what its
small functions compute is found out by calling them. A description is a guess until a trial has
shown that it gives the layer's numbers (`layer.use_native_layers`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from outpace.targets.cpu.native import Native
from outpace.targets.cpu.native_layers.description import LayerDescription
from outpace.targets.cpu.native_layers.experts import SHARED, Mixture, mixture_of
from outpace.targets.cpu.native_layers.fitting import fits
from outpace.targets.cpu.native_layers.latent import Latent, latent_of
from outpace.targets.cpu.native_layers.probing import (
    NO_CLIP,
    SILU,
    Norm,
    activation_of,
    activation_of_experts,
    norm_of,
)
from outpace.targets.cpu.native_layers.product import Linear, outputs_of
from outpace.targets.cpu.native_layers.recurrence import Recurrence, recurrence_of
from outpace.targets.cpu.weights.layers import hooks_of
from outpace.targets.hf.kinds import rope_entries

INPUT, POST_ATTENTION = "input_layernorm", "post_attention_layernorm"
POST_MLP = "post_feedforward_layernorm"
NORM_LAYOUTS: Sequence[tuple[str | None, str | None, str | None, str | None]] = (
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
        norm_over_heads=len(shape) == 1 and shape[0] == width != attention.head_dim,
        norm_stride=attention.head_dim if len(shape) == 2 else 0,
        activation=activation,
        mixture=mixture,
        latent=heads.latent,
        recurrence=heads.recurrence,
        clip=clip,
        scaling=float(getattr(attention, "scaling", 1.0)),
        softcap=float(getattr(attention, "attn_logit_softcapping", None) or 0.0),
        residual_multiplier=float(getattr(layer, "residual_multiplier", 1.0)),
    )
    return found if fits(found, library) and _is_all(found, mlp, shared) else None


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
    places = next((row for row in NORM_LAYOUTS if {*row} - {None} == names), None)
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
    four = (found.q_b, found.kv_a, found.v_b, found.output)
    query, latent, values, output = (Linear(each, 0, outputs_of(each)) for each in four)
    first, keys = (
        None if each is None else Linear(each, 0, outputs_of(each))
        for each in (found.q_a, found.k_b)
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
