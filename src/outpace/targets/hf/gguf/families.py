"""The families of GGUF files that are read: what transformers calls each, how its weights are laid
out, and what its configuration needs besides what all have.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from outpace.errors import ModelLoadError, UnsupportedModel
from outpace.targets.hf.gguf.family import (
    ALL_FACTORS,
    FULL,
    SLIDING,
    Family,
    Options,
    attended,
    by_layer,
    has,
    needed,
    windows,
)
from outpace.targets.hf.gguf.file import GGUFModel
from outpace.targets.hf.gguf.layouts import Layout

STILL = 1e20
"""Factors so large stand for numbers of a head that are not turned."""


def _gemma(largest: int) -> Callable[[GGUFModel, Options], Options]:
    """largest: layers of the one size whose attention is scaled by another number."""

    def further(model: GGUFModel, options: Options) -> Options:
        own = options["hidden_size"] // options["num_attention_heads"]
        scaled = own if options["num_hidden_layers"] == largest else options["head_dim"]
        found: Options = {"query_pre_attn_scalar": scaled}
        if model.architecture == "gemma3" and not model.number("attention.sliding_window"):
            found["layer_types"] = [FULL] * options["num_hidden_layers"]
        return found

    return further


def _gemma4(model: GGUFModel, options: Options) -> Options:
    if model.number("expert_count"):
        raise model.unread("holds a Gemma 4 with experts, whose GGUF files are not read")
    kinds = windows(model, 6)["layer_types"]
    if {*kinds} != {SLIDING, FULL}:
        raise ModelLoadError(f"{model.path} has no layers with and without windows.")
    slides, sees_all = kinds.index(SLIDING), kinds.index(FULL)
    keys, widths = (
        by_layer(model, name) for name in ("attention.head_count_kv", "feed_forward_length")
    )
    same = f"blk.{sees_all}.attn_v.weight" not in model.tensors  # keys are values, too
    own = {"num_global_key_value_heads": keys[sees_all]} if same else {}
    table = model.tensors.get("per_layer_token_embd.weight")
    inputs = {} if table is None else {"vocab_size_per_layer_input": table.shape[0]}
    return {
        **inputs,
        **own,
        "layer_types": kinds,
        "head_dim": needed(model, "attention.key_length_swa"),
        "global_head_dim": model.head_size,
        "num_key_value_heads": keys[slides],
        "attention_k_eq_v": same,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "num_kv_shared_layers": model.number("attention.shared_kv_layers") or 0,
        "hidden_size_per_layer_input": model.number("embedding_length_per_layer_input") or 0,
        "rope_parameters": _in_part(model, options["rope_parameters"]),
    }


def _in_part(model: GGUFModel, rope: Options) -> Options:
    """Returns the angles of Gemma 4, whose layers without windows turn a part of each head: a file
    says which by factors that leave the others nearly still."""
    factors = model.tensors.get("rope_freqs.weight")
    numbers = np.zeros(0) if factors is None else factors.raw.numpy().view("<f4")
    turned = int((numbers == 1).sum())
    plain = (numbers[:turned] == 1).all() and (numbers[turned:] >= STILL).all()
    if not turned or not plain or rope[FULL]["rope_type"] != "default":
        raise model.unread("turns its heads in a way that is not read")
    share = {"rope_type": "proportional", "partial_rotary_factor": turned / len(numbers)}
    return {**rope, FULL: {**rope[FULL], **share}}


def _gpt2(model: GGUFModel, options: Options) -> Options:
    width = options.pop("feed_forward_length", None)
    return {"n_positions": options["n_ctx"], "n_inner": width}


def _stablelm(model: GGUFModel, options: Options) -> Options:
    return {
        "use_qkv_bias": has(model, "attn_q.bias"),
        "use_parallel_residual": not has(model, "ffn_norm.weight"),
    }


def _falcon(model: GGUFModel, options: Options) -> Options:
    epsilon = options.pop("rms_norm_eps")
    return {"layer_norm_epsilon": epsilon, "ffn_hidden_size": options.pop("intermediate_size")}


def _granite(model: GGUFModel, options: Options) -> Options:
    if model.family_value("rope.scaling.finetuned") is False:
        raise model.unread(
            "holds a Granite that does not turn its heads by positions, which is not read"
        )
    return {**_factors(model), **_biases(model, options)}


def _factors(model: GGUFModel) -> Options:
    return {
        "embedding_multiplier": model.number("embedding_scale") or 1.0,
        "residual_multiplier": model.number("residual_scale") or 1.0,
        "logits_scaling": model.number("logit_scale") or 1.0,
        "attention_multiplier": model.number("attention.scale") or model.head_size**-0.5,
    }


def _granitemoe(model: GGUFModel, options: Options) -> Options:
    found = _granite(model, options)
    found.pop("mlp_bias")
    return {**found, "shared_intermediate_size": model.number(SHARED) or 0}


def _granitehybrid(model: GGUFModel, options: Options) -> Options:
    if model.family_value("rope.scaling.finetuned") is not False:
        raise model.unread(
            "holds a model with Granite's states that turns its heads by positions, as Bamba does, "
            "which is not read"
        )
    heads, inner = needed(model, "ssm.time_step_rank"), needed(model, "ssm.inner_size")
    attends, experts = attended(model), model.number("expert_count") or 0
    first = attends.index(False) if False in attends else 0
    return {
        **_factors(model),
        "layer_types": ["attention" if each else "mamba" for each in attends],
        "num_local_experts": experts,
        "num_experts_per_tok": model.number("expert_used_count") or 0,
        "shared_intermediate_size": (
            (model.number(SHARED) or 0) if experts else options["intermediate_size"]
        ),
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": needed(model, "ssm.group_count"),
        "mamba_d_state": needed(model, "ssm.state_size"),
        "mamba_d_conv": needed(model, "ssm.conv_kernel"),
        "mamba_expand": inner // options["hidden_size"],
        "mamba_conv_bias": f"blk.{first}.ssm_conv1d.bias" in model.tensors,
        "position_embedding_type": None,
    }


def _minicpm(model: GGUFModel, options: Options) -> Options:
    """MiniCPM is a Llama with Granite's factors. Older files do not say them."""
    for name in ("embedding_scale", "residual_scale", "logit_scale"):
        needed(model, name)
    return _granite(model, options)


def _mistral3(model: GGUFModel, options: Options) -> Options:
    beta = model.number("attention.temperature_scale")
    if not beta:
        return {}
    rope = {**options["rope_parameters"], "llama_4_scaling_beta": beta}
    return {"rope_parameters": rope}


def _qwen35(model: GGUFModel, options: Options) -> Options:
    count, values = model.number("block_count"), needed(model, "ssm.time_step_rank")
    said = model.family_value("attention.recurrent_layers")
    period = model.number("full_attention_interval") or 4
    recurrent = [bool((layer + 1) % period) for layer in range(count)]
    if isinstance(said, np.ndarray):
        recurrent = [bool(layer) for layer in said]
    return {
        "linear_conv_kernel_dim": needed(model, "ssm.conv_kernel"),
        "linear_key_head_dim": needed(model, "ssm.state_size"),
        "linear_num_key_heads": needed(model, "ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_value_head_dim": needed(model, "ssm.inner_size") // values,
        "layer_types": ["linear_attention" if layer else FULL for layer in recurrent],
    }


def _lfm2(model: GGUFModel, options: Options) -> Options:
    return {
        "conv_L_cache": needed(model, "shortconv.l_cache"),
        "layer_types": [FULL if attends else "conv" for attends in attended(model)],
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2moe(model: GGUFModel, options: Options) -> Options:
    if model.number("expert_gating_func") not in (None, SIGMOID):
        raise model.unread("weighs its experts in a way that is not read")
    dense = model.number("leading_dense_block_count") or 0
    return {**_lfm2(model, options), "num_dense_layers": dense}


def _bloom(model: GGUFModel, options: Options) -> Options:
    return {"seq_length": needed(model, "context_length")}


def _biases(model: GGUFModel, options: Options) -> Options:
    return {"attention_bias": has(model, "attn_q.bias"), "mlp_bias": has(model, "ffn_up.bias")}


def _cohere(model: GGUFModel, options: Options) -> Options:
    return {
        "logit_scale": model.number("logit_scale"),
        "use_qk_norm": has(model, "attn_q_norm.weight"),
    }


def _cohere2(model: GGUFModel, options: Options) -> Options:
    return {"logit_scale": needed(model, "logit_scale"), **windows(model, 4)}


def _olmo2(model: GGUFModel, options: Options) -> Options:
    return windows(model, 4) if model.number("attention.sliding_window") else {}


def _glm4(model: GGUFModel, options: Options) -> Options:
    if model.family_value("rope.dimension_sections") is not None:
        raise model.unread("holds the text part of a GLM that sees images, which is not read")
    return {"attention_bias": has(model, "attn_q.bias")}


def _seed_oss(model: GGUFModel, options: Options) -> Options:
    return {
        "attention_bias": has(model, "attn_q.bias"),
        "attention_out_bias": has(model, "attn_output.bias"),
    }


def _gptneox(model: GGUFModel, options: Options) -> Options:
    parallel = model.family_value("use_parallel_residual")
    return {
        "use_parallel_residual": parallel is not False,
        "attention_bias": has(model, "attn_qkv.bias"),
    }


def _gpt_oss(model: GGUFModel, options: Options) -> Options:
    rope = options["rope_parameters"]
    untruncated = {"truncate": False} if rope["rope_type"] == "yarn" else {}
    return {**windows(model, 2), "rope_parameters": {**rope, **untruncated}}


def _glm4moe(model: GGUFModel, options: Options) -> Options:
    if model.number("expert_gating_func") not in (None, SIGMOID):
        raise model.unread("weighs its experts in a way that is not read")
    return {
        **_glm4(model, options),
        "use_qk_norm": has(model, "attn_q_norm.weight"),
        "n_shared_experts": needed(model, "expert_shared_count"),
        "first_k_dense_replace": model.number("leading_dense_block_count") or 0,
        "n_group": model.number("expert_group_count") or 1,
        "topk_group": model.number("expert_group_used_count") or 1,
        "routed_scaling_factor": model.number("expert_weights_scale") or 1.0,
        "norm_topk_prob": model.family_value("expert_weights_norm") is not False,
    }


def _latent_heads(model: GGUFModel) -> Options:
    """Files say how long latents are, and that there is one for all heads. To transformers a head
    has the numbers that are turned."""
    turned = needed(model, "rope.dimension_count")
    return {
        "attention.key_length": turned,
        "attention.value_length": turned,
        "attention.head_count_kv": needed(model, "attention.head_count"),
    }


def _deepseek2(model: GGUFModel, options: Options) -> Options:
    turned, groups = needed(model, "rope.dimension_count"), model.number("expert_group_count") or 1
    # Older files say of latents nothing but their length.
    sizes = ("attention.key_length", "attention.value_length")
    key, value = (model.number(f"{name}_mla") or needed(model, name) for name in sizes)
    rope = options["rope_parameters"]
    if rope["rope_type"] == "yarn" and "mscale" not in rope:
        raise model.unread(
            "stretches its positions by YaRN without saying its yarn_log_multiplier, which is not "
            "read"
        )
    # DeepSeek V2's and V3's experts are in groups, which files of the first months do not say.
    if model.number("expert_group_count") is None and model.number("expert_count") in (160, 256):
        raise UnsupportedModel(
            f"{model.path} does not say its expert_group_count, without which other experts would "
            "be chosen: use a file that was converted later, or the model's Hugging Face folder."
        )
    found = {
        "q_lora_rank": model.number("attention.q_lora_rank"),
        "kv_lora_rank": needed(model, "attention.kv_lora_rank"),
        "qk_nope_head_dim": key - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": value,
        "n_shared_experts": model.number("expert_shared_count") or 0,
        "first_k_dense_replace": model.number("leading_dense_block_count") or 0,
        "n_group": groups,
        "topk_group": model.number("expert_group_used_count") or 1,
        "routed_scaling_factor": model.number("expert_weights_scale") or 1.0,
        "norm_topk_prob": model.family_value("expert_weights_norm") is True,
    }
    if _scores_of(model) == SIGMOID:
        return found
    if found["norm_topk_prob"] or _scores_of(model) != SOFTMAX:
        raise model.unread("weighs its experts in a way that is not read")
    return {**found, "topk_method": "group_limited_greedy" if groups > 1 else "greedy"}


def _scores_of(model: GGUFModel) -> Any:
    """The function of a router's numbers. Older files do not say it; biases go with sigmoids."""
    corrected = any(name.endswith(".exp_probs_b.bias") for name in model.tensors)
    return model.number("expert_gating_func") or (SIGMOID if corrected else SOFTMAX)


SHARED = "expert_shared_feed_forward_length"
SOFTMAX, SIGMOID = 1, 2
"""What files call the function that turns the router's numbers into weights of experts."""

PERMUTED = partial(Layout, permuted=True)
OWN = Layout
LINEAR = partial(Layout, offset=1.0, tiled=True)

FAMILIES = {
    "arcee": Family("arcee", PERMUTED, _biases),
    "bloom": Family("bloom", partial(Layout, grouped=True), _bloom),
    "cohere2": Family("cohere2", OWN, _cohere2, factors=frozenset({"logit_scale"})),
    "command-r": Family("cohere", OWN, _cohere, factors=frozenset({"logit_scale"})),
    "deepseek2": Family(
        "deepseek_v2",
        OWN,
        _deepseek2,
        variant=lambda model: "deepseek_v3" if _scores_of(model) == SIGMOID else "deepseek_v2",
        table="",
        heads=_latent_heads,
    ),
    "ernie4_5": Family("ernie4_5", OWN, lambda model, _: {"use_bias": has(model, "attn_q.bias")}),
    "exaone4": Family("exaone4", OWN, lambda model, _: windows(model, 4)),
    "exaone": Family("llama", OWN, _biases),
    "falcon": Family("falcon", further=_falcon),
    "gemma": Family("gemma", partial(Layout, offset=1.0)),
    "gemma2": Family("gemma2", further=_gemma(largest=46)),
    "gemma3": Family("gemma3_text", further=_gemma(largest=62), table="gemma3"),
    "gemma4": Family(
        "gemma4_text",
        OWN,
        _gemma4,
        table="",
        lists=("attention.head_count_kv", "feed_forward_length"),
    ),
    "glm4": Family("glm4", OWN, _glm4),
    "glm4moe": Family("glm4_moe", OWN, _glm4moe, table=""),
    "gpt-oss": Family("gpt_oss", partial(Layout, turned=True), _gpt_oss, table=""),
    "gpt2": Family("gpt2", further=_gpt2),
    "gptneox": Family("gpt_neox", partial(Layout, grouped=True), _gptneox),
    "granite": Family("granite", PERMUTED, _granite, factors=ALL_FACTORS),
    "granitemoe": Family(
        "granitemoe",
        PERMUTED,
        _granitemoe,
        variant=lambda model: "granitemoeshared" if model.number(SHARED) else "granitemoe",
        factors=ALL_FACTORS,
    ),
    "granitehybrid": Family(
        "granitemoehybrid", PERMUTED, _granitehybrid, factors=ALL_FACTORS, table=""
    ),
    "internlm2": Family("llama", PERMUTED, _biases),
    "lfm2": Family("lfm2", OWN, _lfm2, table=""),
    "lfm2moe": Family("lfm2_moe", OWN, _lfm2moe),
    "llama": Family(
        "llama",
        PERMUTED,
        variant=lambda model: "mixtral" if model.number("expert_count") else "llama",
    ),
    "mamba": Family(
        "mamba",
        OWN,
        variant=lambda model: (
            "falcon_mamba" if model.family_value("ssm.dt_b_c_rms") is True else "mamba"
        ),
        table="mamba",
    ),
    "minicpm": Family("granite", PERMUTED, _minicpm, factors=ALL_FACTORS),
    "mistral3": Family(
        "ministral3",
        PERMUTED,
        _mistral3,
        variant=lambda model: (
            "ministral3" if model.number("attention.temperature_scale") else "llama"
        ),
    ),
    "nemotron": Family("nemotron"),
    "olmo2": Family(
        "olmo2",
        OWN,
        _olmo2,
        variant=lambda model: "olmo3" if model.number("attention.sliding_window") else "olmo2",
    ),
    "olmoe": Family("olmoe", OWN),
    "phi2": Family("phi", OWN),
    "phi3": Family("phi3"),
    "qwen2": Family("qwen2"),
    "qwen2moe": Family("qwen2_moe"),
    "qwen3": Family("qwen3"),
    "qwen3moe": Family("qwen3_moe"),
    "qwen35": Family("qwen3_5_text", LINEAR, _qwen35),
    "qwen35moe": Family("qwen3_5_moe_text", LINEAR, _qwen35),
    "seed_oss": Family("seed_oss", OWN, _seed_oss),
    "smollm3": Family("smollm3", PERMUTED, _biases),
    "stablelm": Family("stablelm", further=_stablelm),
    "starcoder2": Family("starcoder2"),
}
"""By the architecture's name in GGUF."""


def layout_of(architecture: str, config: Any) -> Any:
    """Returns what puts the tensors of an architecture into the layout of its model."""
    kind = FAMILIES[architecture].layout or TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    return kind(config=config.to_dict())
