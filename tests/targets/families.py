"""Tiny random models in float64, one of each family, on which token identity is exact: see
`outpace.audit.families.models`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers

from outpace.audit.families.models import SCALE, noised, random_model
from outpace.audit.families.sizes import CHUNK, CONTEXT, VOCABULARY, WINDOW

__all__ = ["CHUNK", "CONTEXT", "VOCABULARY", "WINDOW", "noised"]

BASE: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    # A random model with tied embeddings repeats its last token for ever.
    "tie_word_embeddings": False,
}
BOTH = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}


@dataclass(frozen=True)
class Family:
    """A configuration class and what it needs beyond the base."""

    config: str
    options: Mapping[str, Any] = field(default_factory=dict)
    scale: float = SCALE
    attention: str | None = None
    windowed: bool = False


FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaConfig"),
    "gpt2": Family("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}),
    "qwen2": Family("Qwen2Config"),
    "qwen2-window": Family(
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        windowed=True,
    ),
    "qwen3": Family("Qwen3Config", {"head_dim": 8}),
    "mistral": Family("MistralConfig", {"sliding_window": WINDOW}, windowed=True),
    "gemma": Family("GemmaConfig", {"head_dim": 8}),
    "gemma2": Family(
        "Gemma2Config",
        {"head_dim": 8, "sliding_window": WINDOW, "layer_types": BOTH},
        attention="eager",  # the only kernel with the soft cap
        windowed=True,
    ),
    "gemma3": Family(
        "Gemma3TextConfig",
        {"head_dim": 8, "sliding_window": WINDOW, "layer_types": BOTH},
        windowed=True,
    ),
    "phi3": Family("Phi3Config", {"sliding_window": WINDOW}, windowed=True),
    "gpt_neox": Family("GPTNeoXConfig"),
    "opt": Family("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "olmo2": Family("Olmo2Config"),
    "mixtral": Family("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": Family("Qwen3MoeConfig", {"head_dim": 8, "num_experts": 4, **EXPERTS}),
    "deepseek_v3": Family(
        "DeepseekV3Config",
        {
            **EXPERTS,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
        },
    ),
    "deepseek_v32": Family(
        "DeepseekV32Config",
        {
            **EXPERTS,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
            "index_topk": CHUNK,
            "index_head_dim": 16,
        },
    ),
    "llama4": Family(
        "Llama4TextConfig",
        {
            **EXPERTS,
            "head_dim": 8,
            "num_local_experts": 4,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": CHUNK,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "moe_layers": [1],
            "floor_scale": CHUNK,
        },
    ),
    "bart": Family(
        "BartConfig", {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4}
    ),
    "bloom": Family("BloomConfig", {"n_layer": 2, "n_head": 4}),
    "falcon-alibi": Family("FalconConfig", {"alibi": True}, scale=24.0),
    "gpt_neo": Family(
        "GPTNeoConfig",
        {
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": WINDOW,
        },
    ),
    "minimax_m3": Family(
        "MiniMaxM3VLTextConfig",
        {
            **EXPERTS,
            "head_dim": 8,
            "num_local_experts": 4,
            "dense_intermediate_size": 48,
            "shared_intermediate_size": 16,
            "layer_types": ["full_attention", "minimax_m3_sparse"],
            "mlp_layer_types": ["dense", "sparse"],
            "rotary_dim": 8,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_block_size": 4,
            "index_topk_blocks": 2,
        },
    ),
    "falcon": Family("FalconConfig"),
    "cohere": Family("CohereConfig"),
    "cohere2": Family(
        "Cohere2Config", {"sliding_window": WINDOW, "layer_types": BOTH}, windowed=True
    ),
    "phi": Family("PhiConfig"),
    "granite": Family("GraniteConfig"),
    "starcoder2": Family("Starcoder2Config", {"sliding_window": WINDOW}, windowed=True),
    "smollm3": Family("SmolLM3Config"),
    "gpt_oss": Family(
        "GptOssConfig",
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": BOTH,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        windowed=True,
    ),
}


def config_of(name: str, **changes: Any) -> Any:
    """Returns the family's tiny configuration."""
    family = FAMILIES[name]
    return getattr(transformers, family.config)(**{**BASE, **family.options, **changes})


def build(name: str, seed: int = 1, **changes: Any) -> Any:
    """Returns a new model of the family with random weights that depend on the seed only."""
    family = FAMILIES[name]
    return random_model(
        config_of(name, **changes), seed=seed, scale=family.scale, attention=family.attention
    )


@cache
def target(name: str) -> Any:
    """Returns the family's model, shared by all tests: do not change it."""
    return build(name)


@cache
def drafter(name: str, noise: float = 0.05) -> Any:
    """Returns a noised copy of the family's shared model."""
    return noised(target(name), noise)


PROMPTS = ([5, 6, 7, 8, 9], [1], [2, 3] * 6, [11, 12, 13])
"""Ragged: one token, fewer than a window, and more than one."""


@cache
def plain(name: str, length: int, prompts: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    """Returns what transformers' own greedy generate makes of each prompt alone."""
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        made = target(name).generate(
            ids, max_new_tokens=length, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        texts.append(made[0, len(prompt) :].tolist())
    return texts
