"""GGUF files of tiny random models, written as llama.cpp's converter writes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType
from tokenizers.pre_tokenizers import ByteLevel

from targets.families import BASE

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BYTES = sorted(ByteLevel.alphabet())
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ t", "Ġt h"]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*BYTES, *("".join(merge.split()) for merge in MERGES), *CONTROL]
"""A vocabulary of single bytes, a few merges, and what chats need."""
VOCABULARY = len(TOKENS) + 7
"""Heads are often wider than what the tokenizer knows."""


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
EXTRA = {
    "block_sparse_moe.experts.gate_proj": "ffn_gate_exps",
    "block_sparse_moe.experts.up_proj": "ffn_up_exps",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps",
    "block_sparse_moe.router": "ffn_gate_inp",
    "shared_mlp.gate_proj": "ffn_gate_shexp",
    "shared_mlp.up_proj": "ffn_up_shexp",
    "feed_forward.experts.gate_proj": "ffn_gate_exps",
    "feed_forward.experts.up_proj": "ffn_up_exps",
    "feed_forward.expert_bias": "exp_probs_b",
    "post_attention_layernorm": "ffn_norm",
    "linear_attn.dt_bias": "ssm_dt",
}
"""Weights of layers that the library's table of names leaves out."""
ALONE = ("A_log", "D")
"""Weights whose tensors have no ending."""


def tiny(arch: str, **changes: Any) -> Any:
    """Returns a tiny random model in float32, with sizes that blocks of 32 divide."""
    family = FAMILIES[arch]
    options = {**BASE, "vocab_size": VOCABULARY, **WIDE, **family.options, **changes}
    if "layer_types" in options:
        count, types = options["num_hidden_layers"], options["layer_types"]
        options["layer_types"] = [types[layer % len(types)] for layer in range(count)]
    config = getattr(transformers, family.config)(**options)
    if family.config == "Gemma4TextConfig":  # other sizes in each layer, which are asked for below
        config.allow_global_per_layer_attribute_access = True
    torch.manual_seed(1)
    attention = "eager" if arch == "gemma2" else None
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for _, weight in _weights(model):
            weight.copy_(torch.randn_like(weight) * (0.2 if weight.dim() > 1 else 0.1))
    return model.eval()


def write(
    path: Path,
    arch: str,
    model: Any,
    kind: str = "F32",
    *,
    changes: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
    without: Collection[str] = (),
    tokens: bool = True,
    alignment: int | None = None,
) -> Path:
    """Writes a model to a file; matrices in the kind, where blocks of it divide them.

    changes: other values, None for those to leave out. tensors: more of them, as arrays. without:
    tensors to leave out. tokens: whether it holds a tokenizer. alignment: of its tensors, in bytes.
    """
    writer = gguf.GGUFWriter(path, FAMILIES[arch].arch or arch)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    found = {**_values(arch, model.config), **(_vocabulary() if tokens else {}), **(changes or {})}
    for name, value in found.items():
        _add(writer, name, value)
    for name, numbers in {**_tensors(arch, model), **(tensors or {})}.items():
        if name not in without:
            _add_tensor(writer, name, numbers, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _values(arch: str, config: Any) -> dict[str, Any]:
    family = FAMILIES[arch]
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    epsilon = "layer_norm_rms_epsilon" if family.rms else "layer_norm_epsilon"
    named = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps")
    width = getattr(config, "intermediate_size", getattr(config, "ffn_hidden_size", None))
    heads = getattr(config, "num_attention_heads", 0)
    keys = getattr(config, "num_key_value_heads", heads)
    values = {
        "context_length": getattr(config, "max_position_embeddings", 128),
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": width or 4 * config.hidden_size,
        "attention.head_count": heads,
        "attention.head_count_kv": 1 if arch == "falcon" else keys,
        f"attention.{epsilon}": float(
            next((getattr(config, n) for n in named if hasattr(config, n)), 1e-5)
        ),
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
    }
    if getattr(config, "head_dim", None) and arch != "falcon":
        size = config.head_dim
        values |= {"attention.key_length": size, "attention.value_length": size}
    values |= family.values(config)
    return {f"{family.arch or arch}.{name}": value for name, value in values.items()}


def _vocabulary() -> dict[str, Any]:
    more = [f"[PAD{number}]" for number in range(VOCABULARY - len(TOKENS))]
    types = [1] * (len(TOKENS) - len(CONTROL)) + [3] * len(CONTROL) + [5] * len(more)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*TOKENS, *more],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.eos_token_id": TOKENS.index("<|im_end|>"),
        "tokenizer.ggml.padding_token_id": TOKENS.index("<|endoftext|>"),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    add: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
        str: writer.add_string, list: writer.add_array,
    }  # fmt: skip
    if value is not None:
        add[type(value)](name, value)


def _add_tensor(writer: gguf.GGUFWriter, name: str, numbers: Any, kind: str) -> None:
    chosen = _kind_of(name, numbers, kind)
    numbers = numbers.squeeze()  # as the converter does
    raw = in_kind(np.ascontiguousarray(numbers, np.float32), chosen)
    writer.add_tensor(name, raw, raw_shape=raw.shape, raw_dtype=chosen)


def _kind_of(name: str, numbers: Any, kind: str) -> GGMLQuantizationType:
    chosen = GGMLQuantizationType[kind]
    size, _ = gguf.GGML_QUANT_SIZES[chosen]
    plain = (
        numbers.ndim == 1 or numbers.shape[-1] % size or "ffn_gate_inp" in name or "ssm_a" in name
    )
    return GGMLQuantizationType.F32 if plain else chosen


def rounded(arch: str, model: Any, kind: str) -> Any:
    """Rounds a model's weights as a file of the kind does, where families hold them row by row as
    the model does. Returns the model."""
    for name, weight in _weights(model):
        numbers = weight.detach().numpy()
        theirs = next(iter(_of_weight(arch, model.config, name, numbers)))
        raw = gguf.quants.quantize(numbers, _kind_of(theirs, numbers, kind))
        widened = gguf.quants.dequantize(raw, _kind_of(theirs, numbers, kind))
        weight.data = torch.from_numpy(np.array(widened, np.float32).reshape(weight.shape))
    return model


def in_kind(numbers: Any, kind: GGMLQuantizationType) -> Any:
    """Returns numbers in a kind; random blocks of their size where the library writes none."""
    try:
        return gguf.quants.quantize(numbers, kind)
    except NotImplementedError:
        size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(0)
    blocks = generator.integers(0, 256, (numbers.size // size, nbytes), np.uint8)
    scales = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind.name]
    for place in scales:
        few = generator.uniform(1e-4, 1e-3, (len(blocks), 1)).astype(np.float16)
        blocks[:, place : place + 2] = few.view(np.uint8)
    return blocks.reshape(*numbers.shape[:-1], -1)


def _tensors(arch: str, model: Any) -> dict[str, Any]:
    """Returns a model's weights under llama.cpp's names, in its layout."""
    found: dict[str, Any] = {}
    for name, weight in _weights(model):
        found |= _of_weight(arch, model.config, name, weight.detach().numpy())
    if model.config.model_type == "gemma4_text":  # a quarter of each head is turned
        found["rope_freqs.weight"] = np.array([1.0] * 8 + [1e30] * 24)
    return found


def _weights(model: Any) -> list[tuple[str, Any]]:
    """Returns the weights and persistent buffers of a model, a tied one once."""
    kept = model.state_dict(keep_vars=True)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    return [(name, weight) for name, weight in kept.items() if name not in tied]


def _of_weight(arch: str, config: Any, name: str, numbers: Any) -> dict[str, Any]:
    """Returns the tensors that are made of a weight."""
    own = FAMILIES[arch].arch or arch
    kind = next(kind for kind, known in gguf.MODEL_ARCH_NAMES.items() if known == own)
    table = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    found: dict[str, Any] = {}
    for part, piece in _split(name, numbers):
        stem, dot, suffix = part.rpartition(".")
        stem, suffix = (stem, dot + suffix) if suffix in ("weight", "bias") else (part, ".weight")
        theirs = table.get_name(stem) or _extra(stem)
        suffix = "" if part.endswith(ALONE) else suffix
        suffix = ".bias" if part.endswith(("expert_bias", "dt_bias")) else suffix
        found[theirs + suffix] = _laid_out(arch, config, name, piece)
    return found


def _extra(stem: str) -> str:
    if stem == "transformer.word_embeddings_layernorm":
        return "token_embd_norm"
    match = re.fullmatch(r"\w+\.\w+\.(\d+)\.(.*)", stem)
    assert match is not None, stem
    return f"blk.{match[1]}.{EXTRA[match[2]]}"


def _split(name: str, numbers: Any) -> list[tuple[str, Any]]:
    halved = re.fullmatch(r"(.*)(experts\.gate_up_proj|shared_mlp\.input_linear\.weight)", name)
    if halved is None:
        return [(name, numbers)]
    stem = f"{halved[1]}{halved[2].split('.')[0]}"
    gate, up = np.split(numbers, 2, axis=-2)
    return [(f"{stem}.gate_proj", gate), (f"{stem}.up_proj", up)]


def _laid_out(arch: str, config: Any, name: str, numbers: Any) -> Any:
    family = FAMILIES[arch]
    if family.permuted and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        halves = numbers.reshape(heads, 2, -1, *numbers.shape[1:])
        return halves.swapaxes(1, 2).reshape(numbers.shape)
    if family.grouped and "query_key_value" in name:
        each = numbers.reshape(config.num_attention_heads, 3, -1, *numbers.shape[1:])
        return each.swapaxes(0, 1).reshape(numbers.shape)
    if family.tiled and "linear_attn" in name:
        numbers = _in_turns(config, name, numbers)
    if name.endswith("A_log"):
        return -np.exp(numbers)
    if "linear_attn.norm" in name:
        return numbers
    if arch == "gpt2" and numbers.ndim == 2 and ".h." in name:
        return numbers.T
    return numbers + family.norm if name.endswith("norm.weight") else numbers


def _in_turns(config: Any, name: str, numbers: Any) -> Any:
    """Returns a weight of linear attention with the value heads in turns of the key heads."""

    def turned(rows: Any) -> Any:
        keys = config.linear_num_key_heads
        each = rows.reshape(keys, config.linear_num_value_heads // keys, -1, *rows.shape[1:])
        return each.swapaxes(0, 1).reshape(rows.shape)

    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        before = 2 * config.linear_num_key_heads * config.linear_key_head_dim
        return np.concatenate([numbers[:before], turned(numbers[before:])])
    if name.endswith("out_proj.weight"):
        return turned(numbers.T).T
    return numbers if name.endswith("norm.weight") else turned(numbers)
