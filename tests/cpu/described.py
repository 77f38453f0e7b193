"""Tiny models of the families whose layers our own code can describe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

BASE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
BOTH = ["sliding_attention", "full_attention"]
WINDOW = {"sliding_window": 6, "layer_types": BOTH}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
LOCAL = {"full_attention": {**ROPE, "rope_theta": 1e5}, "sliding_attention": ROPE}

LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
    "q_lora_rank": 32,
}
DENSE = {**LATENT, "first_k_dense_replace": 2}
STRETCHED = {
    **ROPE,
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 0.8,
}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 80,
    "linear_conv_kernel_dim": 4,
}

GRANITE_4 = {
    **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 48},
    "layer_types": ["linear_attention", "full_attention"],
    "num_local_experts": 0,
    "shared_intermediate_size": 96,
    "residual_multiplier": 0.3,
    "embedding_multiplier": 4.0,
    "logits_scaling": 3.0,
    "attention_multiplier": 0.1,
}

DESCRIBED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-gelu": ("Llama", {"hidden_act": "gelu"}),
    "mistral": ("Mistral", {"sliding_window": 6}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, **WINDOW}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "gemma": ("Gemma", {"head_dim": 32}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 32,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 1.5,
            "query_pre_attn_scalar": 16,
            **WINDOW,
        },
    ),
    "gemma3": ("Gemma3Text", {"head_dim": 32, "rope_parameters": LOCAL, **WINDOW}),
    "phi": ("Phi", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}),
    "phi3": ("Phi3", {"sliding_window": 6}),
    "granite": (
        "Granite",
        {
            "residual_multiplier": 0.3,
            "embedding_multiplier": 4.0,
            "logits_scaling": 3.0,
            "attention_multiplier": 0.1,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", WINDOW),
    "cohere": ("Cohere", {"use_qk_norm": True, "logit_scale": 0.25}),
    "cohere2": ("Cohere2", {"logit_scale": 0.25, **WINDOW}),
    "glm4": ("Glm4", {"head_dim": 32, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}),
    "stablelm": ("StableLm", {"use_parallel_residual": False}),
    "stablelm-parallel": ("StableLm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    "starcoder2": ("Starcoder2", {"sliding_window": None}),
    "nemotron": ("Nemotron", {}),
    "arcee": ("Arcee", {}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 32}),
    "exaone4": ("Exaone4", WINDOW),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0]}),
    "seed_oss": ("SeedOss", {"head_dim": 32}),
    "deepseek_v2": ("DeepseekV2", {**DENSE, "q_lora_rank": None, "rope_parameters": STRETCHED}),
    "deepseek_v3": ("DeepseekV3", {**DENSE, "attention_bias": True}),
    "deepseek_v3-yarn": ("DeepseekV3", {**DENSE, "rope_parameters": STRETCHED}),
    "deepseek_v3-halves": ("DeepseekV3", {**DENSE, "rope_interleave": False}),
    "glm4_moe_lite": ("Glm4MoeLite", {**LATENT, "mlp_layer_types": ["dense"] * 2}),
    "youtu": ("Youtu", LATENT),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"], "conv_bias": True}),
    "lfm2-taps": ("Lfm2", {"layer_types": ["conv", "conv"], "conv_L_cache": 4}),
    "qwen3_next": ("Qwen3Next", {**DELTA, "mlp_only_layers": [0, 1]}),
    "qwen3_5": ("Qwen3_5Text", DELTA),
    "granite4": ("GraniteMoeHybrid", {**GRANITE_4, "position_embedding_type": "rope"}),
    "granite4-still": ("GraniteMoeHybrid", {**GRANITE_4, "mamba_n_groups": 2}),
}
"""The beginning of the names of each family's classes, and its options."""


def made(family: str, **more: Any) -> PreTrainedModel:
    """Returns a model with random weights, whose norms and biases are random too: norms of ones and
    biases of zeros would hide what is left out."""
    torch.manual_seed(0)
    name, options = DESCRIBED[family]
    config = getattr(transformers, f"{name}Config")(**{**BASE, **options, **more})
    found: PreTrainedModel = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(
        config
    )
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    return found.eval()
