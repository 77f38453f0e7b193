"""Tiny random models in float64, one of each family, on which token identity is exact: see
`lab.families.models`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from lab.families.models import SCALE, noised, random_model
from lab.families.sizes import CHUNK, CONTEXT, VOCABULARY, WINDOW

from devices import DEVICE, on_device
from versions import known_class

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
    cached: bool = True
    """Whether transformers' own generate is right with a cache: some keep states from call to call,
    which a prompt of one token then goes on from."""


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

LINEAR = ["linear_attention", "full_attention"]
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
DELTA = {
    "layer_types": LINEAR,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
LATENT = {
    **EXPERTS,
    "layer_types": LINEAR,
    "num_experts": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
}
ZAMBA = {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"]}

RECURRENT: Mapping[str, Family] = {
    "mamba": Family("MambaConfig", {"state_size": 8, "time_step_rank": 4}),
    "mamba2": Family(
        "Mamba2Config",
        {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    ),
    "falcon_mamba": Family("FalconMambaConfig", {"state_size": 8, "time_step_rank": 4}),
    "jamba": Family(
        "JambaConfig",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
    "bamba": Family("BambaConfig", {**MAMBA, "attn_layer_indices": [1]}),
    "granitemoehybrid": Family(
        "GraniteMoeHybridConfig",
        {
            **MAMBA,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 16,
        },
    ),
    "nemotron_h": Family(
        "NemotronHConfig",
        {
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "attention", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 1,
            "ssm_state_size": 8,
            "chunk_size": 8,
            "head_dim": 8,
        },
    ),
    "falcon_h1": Family("FalconH1Config", {**MAMBA, "mamba_d_ssm": 64}),
    "lfm2": Family("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    "lfm2_moe": Family(
        "Lfm2MoeConfig",
        {
            **EXPERTS,
            "layer_types": ["conv", "full_attention"],
            "num_experts": 4,
            "num_dense_layers": 1,
        },
    ),
    "lfm3": Family(
        "Lfm3Config",
        {"num_hidden_layers": 3, "layer_types": ["conv", *BOTH], "sliding_window": WINDOW},
        windowed=True,
    ),
    "qwen3_next": Family(
        "Qwen3NextConfig",
        {
            **DELTA,
            **EXPERTS,
            "head_dim": 8,
            "num_experts": 4,
            "shared_expert_intermediate_size": 16,
            "linear_num_key_heads": 2,
        },
    ),
    "qwen3_5": Family("Qwen3_5TextConfig", {**DELTA, "head_dim": 8, "linear_num_key_heads": 2}),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeTextConfig",
        {
            **DELTA,
            **EXPERTS,
            "head_dim": 8,
            "num_experts": 4,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "zamba": Family(
        "ZambaConfig",
        {
            **ZAMBA,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "n_mamba_heads": 2,
            "attention_head_dim": 16,
        },
    ),
    "zamba2": Family(
        "Zamba2Config",
        {
            **ZAMBA,
            "mamba_d_state": 8,
            "mamba_ngroups": 1,
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "chunk_size": 8,
            "num_mem_blocks": 1,
            "use_mem_rope": True,
        },
    ),
    "olmo_hybrid": Family("OlmoHybridConfig", DELTA),
    "kimi_linear": Family(
        "KimiLinearConfig", {**LATENT, "linear_num_heads": 4, "linear_head_dim": 8}
    ),
    "bailing_hybrid": Family(
        "BailingHybridConfig",
        {**LATENT, "q_lora_rank": 16, "head_dim": 8, "n_group": 1, "topk_group": 1},
    ),
    "zaya": Family("ZayaConfig", {"head_dim": 8, "num_experts": 4}),
    "minimax": Family(
        "MiniMaxConfig",
        {
            "layer_types": LINEAR,
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "block_size": 4,
        },
    ),
    "recurrent_gemma": Family(
        "RecurrentGemmaConfig",
        {
            "num_hidden_layers": 3,
            "block_types": ["recurrent", "recurrent", "attention"],
            "lru_width": 32,
            "attention_window_size": WINDOW,
            "head_dim": 8,
        },
        cached=False,
    ),
    "rwkv": Family("RwkvConfig", {"rescale_every": 1}),
    "xlstm": Family(
        "xLSTMConfig",
        {"hidden_size": 64, "num_heads": 4, "qk_dim_factor": 1.0, "chunk_size": 4},
    ),
}
"""Families with layers that keep a state."""


def family_of(name: str) -> Family:
    """Returns the family of this name, with states or without."""
    return FAMILIES[name] if name in FAMILIES else RECURRENT[name]


def config_of(name: str, **changes: Any) -> Any:
    """Returns the family's tiny configuration."""
    family = family_of(name)
    return known_class(family.config)(**{**BASE, **family.options, **changes})


def build(name: str, seed: int = 1, **changes: Any) -> Any:
    """Returns a new model of the family with random weights that depend on the seed only."""
    family = family_of(name)
    config = config_of(name, **changes)
    with torch.inference_mode(False):  # in which the first test that asks for it may be
        made = random_model(config, seed=seed, scale=family.scale, attention=family.attention)
        return made.to(DEVICE)


NOISE = {"falcon": 0.2}
"""How far the weights of drafters are off that would otherwise always be right."""


@cache
def target(name: str) -> Any:
    """Returns the family's model, shared by all tests: do not change it."""
    return build(name)


@cache
def drafter(name: str, noise: float | None = None) -> Any:
    """Returns a noised copy of the family's shared model."""
    with torch.inference_mode(False):
        return noised(target(name), NOISE.get(name, 0.05) if noise is None else noise)


PROMPTS = ([5, 6, 7, 8, 9], [1], [2, 3] * 6, [11, 12, 13])
"""Ragged: one token, fewer than a window, and more than one."""


@cache
def plain(name: str, length: int, prompts: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    """Returns what transformers' own greedy generate makes of each prompt alone."""
    texts = []
    for prompt in prompts:
        ids = on_device([prompt])
        made = target(name).generate(
            ids,
            max_new_tokens=length,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            use_cache=family_of(name).cached,
        )
        texts.append(made[0, len(prompt) :].tolist())
    return texts
