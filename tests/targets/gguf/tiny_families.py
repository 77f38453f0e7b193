"""Tiny models of each family of GGUF files, and what llama.cpp's converter writes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from targets.gguf.words import VOCABULARY


@dataclass(frozen=True)
class Family:
    """A configuration class, and what of a family's files cannot be read off its model."""

    config: str
    options: Mapping[str, Any] = field(default_factory=dict)
    values: Callable[[Any], Mapping[str, Any]] = lambda config: {}
    """Further values of a file, from the configuration."""
    rms: bool = True
    norm: float = 0.0
    """What the converter adds to the weights of norms."""
    permuted: bool = False
    """Whether it puts the rows of queries and keys in Llama's order."""
    tiled: bool = False
    """Whether it puts the value heads of linear attention in turns of the key heads."""
    arch: str | None = None
    """The architecture's name in GGUF, if it is not its own."""
    grouped: bool = False
    """Whether it takes apart queries, keys and values that the model holds head by head."""
    apart: bool = False
    """Whether what makes keys and values of latents is taken apart."""
    turned: bool = False
    """Whether the model holds experts as ``[K, N]``, gates in turns with what they multiply."""


def _gemma4(config: Any) -> Mapping[str, Any]:
    whole = config.per_layer_config[1]
    kinds = [kind == "full_attention" for kind in config.layer_types]
    keys = getattr(whole, "num_key_value_heads", config.num_key_value_heads)
    shared, width = config.num_kv_shared_layers, config.intermediate_size
    wide = 2 if config.use_double_wide_mlp else 1
    last = len(kinds) - shared
    return {
        **_windows(config),
        "attention.key_length": whole.head_dim,
        "attention.value_length": whole.head_dim,
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "attention.head_count_kv": [keys if sees else config.num_key_value_heads for sees in kinds],
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "feed_forward_length": [width if n < last else wide * width for n in range(len(kinds))],
        "final_logit_softcapping": config.final_logit_softcapping,
        "rope.dimension_count": whole.head_dim,
        "rope.dimension_count_swa": config.head_dim,
        "rope.freq_base_swa": 10000.0,
    }


def _yarn(config: Any) -> Mapping[str, Any]:
    rope = config.rope_parameters
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": rope["beta_fast"],
        "rope.scaling.yarn_beta_slow": rope["beta_slow"],
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    }


def _linear(config: Any) -> Mapping[str, Any]:
    heads = config.linear_num_value_heads
    return {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": heads,
        "ssm.inner_size": config.linear_value_head_dim * heads,
        "attention.recurrent_layers": [k == "linear_attention" for k in config.layer_types],
        "rope.dimension_count": config.head_dim // 4,
        "rope.dimension_sections": [2, 1, 1, 0],
    }


def _attended(config: Any) -> Mapping[str, Any]:
    heads = config.num_key_value_heads
    kinds = [heads if kind == "full_attention" else 0 for kind in config.layer_types]
    return {"attention.head_count_kv": kinds, "shortconv.l_cache": config.conv_L_cache}


def _attended_moe(config: Any) -> Mapping[str, Any]:
    more = {"leading_dense_block_count": config.num_dense_layers, "expert_gating_func": 2}
    return {**_attended(config), **_experts(config), **more}


def _states(config: Any) -> Mapping[str, Any]:
    return {
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.inner_size": config.intermediate_size,
        "ssm.state_size": config.state_size,
        "ssm.time_step_rank": config.time_step_rank,
        "ssm.dt_b_c_rms": config.model_type == "falcon_mamba",
        "attention.head_count": 0,
        "attention.head_count_kv": None,
        "feed_forward_length": 0,
    }


def _partial(config: Any) -> Mapping[str, Any]:
    size = config.hidden_size // config.num_attention_heads
    return {"rope.dimension_count": int(size * config.rope_parameters["partial_rotary_factor"])}


def _experts(config: Any) -> Mapping[str, Any]:
    shared = getattr(config, "shared_expert_intermediate_size", None)
    return {
        "expert_count": getattr(config, "num_experts", None) or config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
        "expert_shared_feed_forward_length": getattr(config, "shared_intermediate_size", shared),
    }


def _gpt_oss(config: Any) -> Mapping[str, Any]:
    rope = config.rope_parameters
    return {
        **_experts(config),
        **_window(config),
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
    }


def _glm4moe(config: Any) -> Mapping[str, Any]:
    return {**_partial(config), **_glm4moe_experts(config)}


def _glm4moe_experts(config: Any) -> Mapping[str, Any]:
    return {
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_gating_func": 2,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": config.norm_topk_prob,
    }


def _latent(config: Any) -> Mapping[str, Any]:
    """As files have it since keys and values are made by two tensors."""
    rope, size = config.rope_parameters, config.kv_lora_rank
    sigmoid = config.model_type == "deepseek_v3"
    found = {
        **_glm4moe_experts(config),
        "expert_gating_func": 2 if sigmoid else 1,
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": size,
        "attention.key_length": size + config.qk_rope_head_dim,
        "attention.value_length": size,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
    }
    if rope["rope_type"] == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        }
    return found


def _latent_before(config: Any) -> Mapping[str, Any]:
    """As files had it before: of DeepSeek V2, without the function of the router's numbers."""
    return {
        **_latent(config),
        "expert_gating_func": None,
        "expert_weights_norm": None,
        "attention.head_count_kv": config.num_attention_heads,
        "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length": config.v_head_dim,
        "attention.key_length_mla": None,
        "attention.value_length_mla": None,
    }


def _window(config: Any) -> Mapping[str, Any]:
    return {"attention.sliding_window": config.sliding_window}


def _windows(config: Any) -> Mapping[str, Any]:
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    return {**_window(config), "attention.sliding_window_pattern": slides}


def _logit_scale(config: Any) -> Mapping[str, Any]:
    return {"logit_scale": config.logit_scale}


def _factors(config: Any) -> Mapping[str, Any]:
    return {
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
        "attention.scale": config.attention_multiplier,
    }


def _scanned(config: Any) -> Mapping[str, Any]:
    heads = config.num_key_value_heads
    attends = [kind in ("attention", "full_attention") for kind in config.layer_types]
    return {
        **_factors(config),
        "attention.head_count_kv": [heads if each else 0 for each in attends],
        "rope.scaling.finetuned": False,
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.inner_size": config.mamba_expand * config.hidden_size,
        "ssm.state_size": config.mamba_d_state,
        "ssm.time_step_rank": config.mamba_n_heads,
        "ssm.group_count": config.mamba_n_groups,
    }


def _neox(config: Any) -> Mapping[str, Any]:
    return {"use_parallel_residual": config.use_parallel_residual, **_partial(config)}


WIDE = {"hidden_size": 64, "intermediate_size": 96}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 6}
TIED = {"tie_word_embeddings": True}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FACTORS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.125,
}
BOTH = ["sliding_attention", "full_attention"]
MANY = {"num_key_value_heads": 4}
STATES = {"state_size": 8, "time_step_rank": 4, "intermediate_size": 128}
CONVOLVED = ["conv", "full_attention"]
ADJUSTED = {"block_auto_adjust_ff_dim": False}
SCANNED = {
    **FACTORS,
    "layer_types": ["mamba", "attention"],
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 4,
    "beta_fast": 16.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
STRETCHED = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}
GEMMA4 = {
    "layer_types": BOTH,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 6,
    "final_logit_softcapping": 5.0,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": VOCABULARY,
    **TIED,
}
SHARING = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaConfig", {"head_dim": 16}, permuted=True),
    "qwen2": Family("Qwen2Config"),
    "qwen3": Family("Qwen3Config", {"head_dim": 32}),
    "gemma2": Family("Gemma2Config", {**GEMMA, **TIED}, _window, norm=1.0),
    "gemma3": Family("Gemma3TextConfig", GEMMA, _window, norm=1.0),
    "phi3": Family("Phi3Config", {"sliding_window": 6}, _window),
    "gpt2": Family("GPT2Config", {"intermediate_size": None, "n_positions": 128}, rms=False),
    "starcoder2": Family("Starcoder2Config", {"sliding_window": None}, rms=False),
    "stablelm": Family("StableLmConfig", {"use_qkv_bias": True}, _partial, rms=False),
    "nemotron": Family("NemotronConfig", {"head_dim": 16}, _partial, rms=False, norm=1.0),
    "qwen2moe": Family(
        "Qwen2MoeConfig", {**EXPERTS, "shared_expert_intermediate_size": 64}, _experts
    ),
    "qwen3moe": Family(
        "Qwen3MoeConfig", {**EXPERTS, "head_dim": 32, "norm_topk_prob": True}, _experts
    ),
    "falcon": Family(
        "FalconConfig", {"multi_query": True, "ffn_hidden_size": 96, "bias": False}, rms=False
    ),
    "granite": Family("GraniteConfig", FACTORS, _factors, permuted=True),
    "gemma": Family("GemmaConfig", {"head_dim": 32, **TIED}, norm=1.0),
    "command-r": Family(
        "CohereConfig", {"logit_scale": 0.5, "use_qk_norm": True, **TIED}, _logit_scale, rms=False
    ),
    "cohere2": Family(
        "Cohere2Config",
        {"logit_scale": 0.5, "sliding_window": 6, "num_hidden_layers": 4, **TIED},
        lambda config: {**_logit_scale(config), **_window(config)},
        rms=False,
    ),
    "olmo2": Family("Olmo2Config"),
    "smollm3": Family("SmolLM3Config", {"num_hidden_layers": 4}, permuted=True),
    "glm4": Family("Glm4Config", {"head_dim": 16}, _partial),
    "exaone4": Family("Exaone4Config", {"sliding_window": 6, "layer_types": BOTH}, _windows),
    "mixtral": Family("MixtralConfig", LOCAL, _experts, permuted=True, arch="llama"),
    "olmoe": Family("OlmoeConfig", {**MANY, "num_experts": 4, "num_experts_per_tok": 2}, _experts),
    "granitemoe": Family(
        "GraniteMoeConfig",
        {**FACTORS, **LOCAL},
        lambda config: {**_factors(config), **_experts(config)},
        permuted=True,
    ),
    "granitemoeshared": Family(
        "GraniteMoeSharedConfig",
        {**FACTORS, **LOCAL, "shared_intermediate_size": 32},
        lambda config: {**_factors(config), **_experts(config)},
        permuted=True,
        arch="granitemoe",
    ),
    "granitehybrid": Family(
        "GraniteMoeHybridConfig",
        {**SCANNED, **LOCAL, "shared_intermediate_size": 32},
        lambda config: {**_scanned(config), **_experts(config)},
        permuted=True,
    ),
    "granitehybrid_dense": Family(
        "GraniteMoeHybridConfig",
        {**SCANNED, "num_local_experts": 0, "shared_intermediate_size": 96},
        _scanned,
        permuted=True,
        arch="granitehybrid",
    ),
    "lfm2": Family("Lfm2Config", {"layer_types": CONVOLVED, **ADJUSTED, **TIED}, _attended),
    "lfm2moe": Family(
        "Lfm2MoeConfig",
        {**EXPERTS, "layer_types": CONVOLVED, "num_dense_layers": 1, **TIED},
        _attended_moe,
    ),
    "mamba": Family("MambaConfig", STATES, _states),
    "falcon_mamba": Family(
        "FalconMambaConfig", STATES, _states, arch="mamba"
    ),
    "bloom": Family(
        "BloomConfig",
        {**MANY, "n_head": 4, "n_layer": 2, "seq_length": 128, **TIED},
        lambda config: {"context_length": config.seq_length, "feed_forward_length": 256},
        rms=False,
        grouped=True,
    ),
    "exaone": Family("LlamaConfig"),
    "minicpm": Family(
        "GraniteConfig",
        {**FACTORS, "attention_multiplier": 0.25},
        lambda config: {**_factors(config), "attention.scale": None},
        permuted=True,
    ),
    "mistral3": Family(
        "Ministral3Config", {"head_dim": 16, "rope_parameters": YARN}, _yarn, permuted=True
    ),
    "qwen35": Family("Qwen3_5TextConfig", LINEAR, _linear, norm=1.0, tiled=True),
    "qwen35moe": Family(
        "Qwen3_5MoeTextConfig",
        {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 64},
        lambda config: {**_linear(config), **_experts(config)},
        norm=1.0,
        tiled=True,
    ),
    "gpt-oss": Family(
        "GptOssConfig",
        {
            **LOCAL,
            "head_dim": 32,
            "sliding_window": 6,
            "layer_types": BOTH,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
        },
        _gpt_oss,
        turned=True,
    ),
    "glm4moe": Family(
        "Glm4MoeConfig",
        {
            "head_dim": 16,
            "use_qk_norm": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        },
        _glm4moe,
    ),
    "deepseek2": Family(
        "DeepseekV3Config",
        {**LATENT, "q_lora_rank": 32, "n_group": 4, "topk_group": 2, "rope_parameters": STRETCHED},
        _latent,
        apart=True,
    ),
    "deepseek2-lite": Family(
        "DeepseekV2Config",
        {**LATENT, "q_lora_rank": None, "rope_parameters": STRETCHED},
        _latent_before,
        arch="deepseek2",
    ),
    "deepseek2-v2": Family(
        "DeepseekV2Config",
        {
            **LATENT, "q_lora_rank": 32, "n_group": 4, "topk_group": 2,
            "topk_method": "group_limited_greedy",
        },
        _latent,
        arch="deepseek2",
        apart=True,
    ),
    "gemma4": Family("Gemma4TextConfig", {**GEMMA4, **SHARING}, _gemma4),
    "gemma4_dense": Family(
        "Gemma4TextConfig",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
        _gemma4,
        arch="gemma4",
    ),
    "phi2": Family("PhiConfig", MANY, _partial, rms=False),
    "gptneox": Family(
        "GPTNeoXConfig", MANY, _neox, rms=False, grouped=True
    ),
    "internlm2": Family("LlamaConfig", permuted=True),
    "seed_oss": Family("SeedOssConfig", {"head_dim": 16}),
    "ernie4_5": Family("Ernie4_5Config", {"head_dim": 16}),
    "arcee": Family("ArceeConfig", {"head_dim": 16}, permuted=True),
}  # fmt: skip
"""By the architecture's name in GGUF, or by a name of their own."""
