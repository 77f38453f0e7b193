"""Helpers for published configurations and weights of heads that are small Llama-like decoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outpace.errors import ConfigError
from outpace.heads.base import Head
from outpace.heads.layers import DEFAULT_ROPE, Attention
from outpace.targets.hf.rotary import with_frequencies

if TYPE_CHECKING:
    from outpace.heads.latent import LatentAttention

SIZES = {
    "heads": "num_attention_heads",
    "groups": "num_key_value_heads",
    "head_dim": "head_dim",
    "inner_size": "intermediate_size",
    "norm_eps": "rms_norm_eps",
}
"""Our names of a layer's sizes, and the public ones."""

LAYERS = "eagle_aux_hidden_state_layer_ids"
"""The entry that says which of the target's layers an EAGLE-3 head reads."""

FULL, SLIDING = "full_attention", "sliding_attention"
"""The types of layers that there are in heads."""

SUPPORTED_VALUES: Mapping[str, Any] = {
    "hidden_act": "silu",
    "mlp_bias": False,
}
"""Entries by which layers that are built otherwise, and cannot be read, are recognised."""


def check_supported(about: Mapping[str, Any], more: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` where a configuration says something else than is known. more: entries
    like `SUPPORTED_VALUES`, of one format."""
    for name, value in {**SUPPORTED_VALUES, **more}.items():
        if about.get(name, value) != value:
            raise ValueError(f"its {name} is {about[name]!r}, and only {value!r} is known")


def layer_sizes(about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of a `LayerConfig` that a public configuration gives."""
    sizes = {name: about[public] for name, public in SIZES.items() if about.get(public) is not None}
    width = sizes.get("head_dim") or about["hidden_size"] // about["num_attention_heads"]
    return {**sizes, "head_dim": width, "rope": _rope(about, width)}


def _rope(about: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """The rotary positions of a layer, in the words of transformers 5, from those of 4 or 5."""
    given = about.get("rope_parameters") or about.get("rope_scaling") or {}
    used = set(about.get("layer_types") or (FULL,))
    by_type = [given[kind] for kind in (FULL, SLIDING) if kind in used and given.get(kind)]
    if any(each != by_type[0] for each in by_type):
        raise ValueError("its layers have other rotary positions by their type")
    given = by_type[0] if by_type else given
    kind = given.get("rope_type") or given.get("type") or "default"
    base = given.get("rope_theta", about.get("rope_theta")) or DEFAULT_ROPE["rope_theta"]
    turned = given.get("partial_rotary_factor", about.get("partial_rotary_factor"))
    part = {} if turned in (None, 1.0) else {"partial_rotary_factor": turned}
    # "mrope" has a position for each of three axes, which are the same one throughout a text.
    if kind in ("default", "mrope"):
        return {"rope_type": "default", "rope_theta": base, **part}
    scaled = {name: value for name, value in given.items() if value is not None and name != "type"}
    rope = {**scaled, "rope_type": kind, "rope_theta": base, **part}
    return with_frequencies(rope, head_dim, about.get("max_position_embeddings"))


def windows(about: Mapping[str, Any], layers: int) -> list[int]:
    """Returns how many entries each of some layers attends to, 0 for all; nothing where all of them
    attend to all."""
    kinds = about.get("layer_types") or []
    if len(kinds) != layers:
        if kinds and len(kinds) != about.get("num_hidden_layers"):
            raise ValueError(f"layer_types are of {len(kinds)} layers, and it has {layers}")
        return []  # copied from the target with the number of its layers
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise ValueError(
                f"a layer is of the type {kind!r}, and only {[FULL, SLIDING]} are known"
            )
    if SLIDING not in kinds:
        return []
    window = about.get("sliding_window")
    if type(window) is not int or window < 1 or about.get("use_sliding_window") is False:
        raise ValueError(f"a layer is of the type {SLIDING!r}, and no sliding_window is used")
    return [window if kind == SLIDING else 0 for kind in kinds]


def layer_config_dict(
    head: Head, attention: Attention | LatentAttention, inner: int, layers: int = 1
) -> dict[str, Any]:
    """Returns the public configuration of a head with ``layers`` layers. inner: width of their
    feed-forward parts."""
    config = asdict(head.config)
    rope = dict(config["rope"])
    rope.pop("inv_freq", None)
    base, part = rope.pop("rope_theta"), rope.pop("partial_rotary_factor", None)
    about = {
        "hidden_size": attention.o_proj.out_features,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.groups,
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config["norm_eps"],
        "rope_theta": base,
        "rope_scaling": None if rope == {"rope_type": "default"} else rope,
        "vocab_size": head.target.vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": str(head.dtype).removeprefix("torch."),
    }
    if part is not None:
        about["partial_rotary_factor"] = part
    if given := config.get("windows"):
        if len({*given} - {0}) > 1:
            raise ConfigError(
                "published configurations have one window for all layers, and this head has "
                f"{given}: keep it in the format 'outpace'."
            )
        about["layer_types"] = [SLIDING if window else FULL for window in given]
        about |= {"sliding_window": max(given), "use_sliding_window": True}
    return about


def drop_inv_freq(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights without those that follow from the configuration."""
    return {
        name: value for name, value in weights.items() if not name.endswith("rotary_emb.inv_freq")
    }


def d2t_from_offsets(weights: dict[str, Tensor], head: Head) -> Tensor:
    """Returns the target's tokens for a head's own, from the distances ``d2t`` of a public file,
    and takes these and ``t2d`` from the weights. Raises ``ValueError`` where they do not fit."""
    offsets, mask = weights.pop("d2t", None), weights.pop("t2d", None)
    if offsets is None:
        if head.vocabulary != head.target.vocab_size:
            raise ValueError(
                f"it scores {head.vocabulary} of {head.target.vocab_size} tokens, and has no d2t"
            )
        return head.d2t
    if offsets.shape != head.d2t.shape:
        raise ValueError(f"d2t has {len(offsets)} entries, not {len(head.d2t)}")
    d2t = offsets.long() + torch.arange(len(offsets))
    size = head.target.vocab_size
    if int(d2t.min()) < 0 or int(d2t.max()) >= size or len(set(d2t.tolist())) != len(d2t):
        raise ValueError(f"d2t does not lead to {len(d2t)} of the {size} tokens")
    if mask is not None and not torch.equal(mask.bool(), _known(d2t, size)):
        raise ValueError("d2t and t2d disagree")
    return d2t


def published_weights(head: Head) -> dict[str, Tensor]:
    """Returns a head's weights with the maps of its tokens as public files have them."""
    weights = dict(head.state_dict())
    d2t = weights.pop("d2t")
    if head.config.draft_vocab_size:
        weights["d2t"] = d2t - torch.arange(len(d2t), device=d2t.device)
        weights["t2d"] = _known(d2t, head.target.vocab_size)
    return weights


def _known(d2t: Tensor, size: int) -> Tensor:
    found = torch.zeros(size, dtype=torch.bool, device=d2t.device)
    found[d2t] = True
    return found


def has_full_vocab(head: Head) -> bool:
    """Returns whether a head's own tokens are the target's, one by one."""
    all_tokens = torch.arange(head.target.vocab_size, device=head.d2t.device)
    return torch.equal(head.d2t, all_tokens)


def rename_prefixes(weights: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Returns the weights with other beginnings of their names."""
    found = {}
    for name, value in weights.items():
        old = next((old for old in names if name.startswith(old)), "")
        found[names[old] + name[len(old) :] if old else name] = value
    return found
