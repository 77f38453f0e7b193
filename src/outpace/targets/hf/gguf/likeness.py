"""A small model of the same kind as a large one, on which to try out how drafts are scored.

Whether a model honours masks and positions is a matter of its code and configuration, not of its
weights. On a model in blocks it cannot be tried exactly: integer products round activations, and
widening all weights for each pass takes many seconds. So it is tried on a model of the same class,
with each type of layer, its heads, windows and angles, but few of them and random weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from outpace.targets.hf.attention import use_grouped

SMALL = {
    "vocab_size": 64,
    "intermediate_size": 64,
    "ffn_hidden_size": 64,
    "n_inner": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_dense_layers": 1,
    "shared_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""What is made smaller, where a configuration has it."""


def likeness_of(config: Any, dtype: torch.dtype, attention: str | None) -> nn.Module:
    """Returns a small random model of the kind that a configuration describes."""
    make: Any = AutoModelForCausalLM.from_config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        small: nn.Module = make(small_config(config), dtype=dtype, attn_implementation=attention)
    use_grouped(small)
    return small.eval()


def small_config(config: Any) -> Any:
    """Returns a configuration of the same kind with few heads, layers and tokens."""
    known: dict[str, Any] = config.to_dict()
    heads = getattr(config, "num_attention_heads", None)
    changes: dict[str, Any] = {name: value for name, value in SMALL.items() if known.get(name)}
    changes["num_hidden_layers"] = 2
    if heads is not None:
        keys = known.get("num_key_value_heads") or heads
        each = heads // keys
        changes["num_attention_heads"] = each
        changes["hidden_size"] = each * (config.hidden_size // heads)
    if "num_key_value_heads" in known:
        changes["num_key_value_heads"] = 1
    before = known.get("layer_types") or ()
    types = list(dict.fromkeys(before))
    if types:
        if known.get("num_kv_shared_layers"):
            changes["num_kv_shared_layers"] = len(types)
            types *= 2
        types = types if len(types) > 1 else types * 2
        if known.get("per_layer_config"):
            own_of = {before[int(n)]: more for n, more in known["per_layer_config"].items()}
            changes["per_layer_config"] = {
                str(n): {**own_of[kind], "num_key_value_heads": 1}
                for n, kind in enumerate(types)
                if kind in own_of
            }
        changes |= {"layer_types": types, "num_hidden_layers": len(types)}
    own = {theirs: ours for theirs, ours in config.attribute_map.items() if theirs in changes}
    named = {own.get(name, name): value for name, value in changes.items()}
    return AutoConfig.for_model(**{**known, **named})
