"""What published configurations of small Llama-like decoders have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outpace.heads.base import Head
from outpace.heads.layers import PLAIN_ROTARY, Attention

SIZES = {
    "heads": "num_attention_heads",
    "groups": "num_key_value_heads",
    "head_dim": "head_dim",
    "inner_size": "intermediate_size",
    "norm_eps": "rms_norm_eps",
}
"""Our names of a layer's sizes, and the public ones."""

ONLY: Mapping[str, Any] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "rope_scaling": None,
}
"""Entries by which layers that are built otherwise, and cannot be read, are told."""


def check_only(about: Mapping[str, Any], only: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` where a configuration says something else than is known."""
    for name, value in {**ONLY, **only}.items():
        if about.get(name, value) != value:
            raise ValueError(f"its {name} is {about[name]!r}, and only {value!r} is known")


def layer_sizes(about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of a `LayerConfig` that a public configuration gives."""
    sizes = {name: about[public] for name, public in SIZES.items() if about.get(public) is not None}
    rope = about.get("rope_parameters") or {
        **PLAIN_ROTARY, "rope_theta": about.get("rope_theta", PLAIN_ROTARY["rope_theta"]),
    }  # fmt: skip
    return {**sizes, "rope": dict(rope)}


def about_layers(head: Head, attention: Attention, inner: int, layers: int = 1) -> dict[str, Any]:
    """Returns the public configuration of a head with ``layers`` layers. inner: width of their
    feed-forward parts."""
    config = head.config.as_dict()
    return {
        "hidden_size": head.target.hidden_size,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.groups,
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config["norm_eps"],
        "rope_theta": config["rope"]["rope_theta"],
        "rope_scaling": None,
        "vocab_size": head.target.vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": str(head.dtype).removeprefix("torch."),
    }


def without_derived(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights without those that follow from the configuration."""
    return {
        name: value for name, value in weights.items() if not name.endswith("rotary_emb.inv_freq")
    }


def knows_all(head: Head) -> bool:
    """Returns whether a head's own tokens are the target's, one by one."""
    all_tokens = torch.arange(head.target.vocab_size, device=head.d2t.device)
    return torch.equal(head.d2t, all_tokens)


def renamed(weights: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Returns the weights with other beginnings of their names."""
    found = {}
    for name, value in weights.items():
        old = next((old for old in names if name.startswith(old)), "")
        found[names[old] + name[len(old) :] if old else name] = value
    return found
