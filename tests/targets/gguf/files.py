"""GGUF files of tiny random models, written as llama.cpp's converter writes them."""

from __future__ import annotations

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
    grouped: bool = False
    """Whether it takes apart queries, keys and values that the model holds head by head."""


def _partial(config: Any) -> Mapping[str, Any]:
    size = config.hidden_size // config.num_attention_heads
    return {"rope.dimension_count": int(size * config.rope_parameters["partial_rotary_factor"])}


def _experts(config: Any) -> Mapping[str, Any]:
    found = {
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
    }
    shared = getattr(config, "shared_expert_intermediate_size", None)
    return found if shared is None else {**found, "expert_shared_feed_forward_length": shared}


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
    "phi2": Family("PhiConfig", {"num_key_value_heads": 4}, _partial, rms=False),
    "gptneox": Family(
        "GPTNeoXConfig", {"num_key_value_heads": 4}, _neox, rms=False, grouped=True
    ),
    "internlm2": Family("LlamaConfig", permuted=True),
    "seed_oss": Family("SeedOssConfig", {"head_dim": 16}),
    "ernie4_5": Family("Ernie4_5Config", {"head_dim": 16}),
    "arcee": Family("ArceeConfig", {"head_dim": 16}, permuted=True),
}  # fmt: skip
"""By the architecture's name in GGUF."""


def tiny(arch: str, **changes: Any) -> Any:
    """Returns a tiny random model in float32, with sizes that blocks of 32 divide."""
    family = FAMILIES[arch]
    options = {**BASE, "vocab_size": VOCABULARY, **WIDE, **family.options, **changes}
    if "layer_types" in options:
        count, types = options["num_hidden_layers"], options["layer_types"]
        options["layer_types"] = [types[layer % len(types)] for layer in range(count)]
    config = getattr(transformers, family.config)(**options)
    torch.manual_seed(1)
    attention = "eager" if arch == "gemma2" else None
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for weight in model.parameters():
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
    writer = gguf.GGUFWriter(path, arch)
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
    keys = getattr(config, "num_key_value_heads", config.num_attention_heads)
    values = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": width or 4 * config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": 1 if arch == "falcon" else keys,
        f"attention.{epsilon}": float(
            next((getattr(config, n) for n in named if hasattr(config, n)), 1e-5)
        ),
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
        **family.values(config),
    }
    if hasattr(config, "head_dim") and arch != "falcon":
        size = config.head_dim
        values |= {"attention.key_length": size, "attention.value_length": size}
    return {f"{arch}.{name}": value for name, value in values.items()}


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
    plain = numbers.ndim == 1 or numbers.shape[-1] % size or "ffn_gate_inp" in name
    return GGMLQuantizationType.F32 if plain else chosen


def rounded(arch: str, model: Any, kind: str) -> Any:
    """Rounds a model's weights as a file of the kind does, where families hold them row by row as
    the model does. Returns the model."""
    for name, weight in model.named_parameters():
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
    for name, weight in model.named_parameters():
        found |= _of_weight(arch, model.config, name, weight.detach().numpy())
    return found


def _of_weight(arch: str, config: Any, name: str, numbers: Any) -> dict[str, Any]:
    """Returns the tensors that are made of a weight."""
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    table = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    found: dict[str, Any] = {}
    for part, piece in _split(name, numbers):
        theirs = table.get_name(part, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, part
        theirs = theirs if theirs.endswith((".weight", ".bias")) else f"{theirs}.weight"
        found[theirs] = _laid_out(arch, config, name, piece)
    return found


def _split(name: str, numbers: Any) -> list[tuple[str, Any]]:
    if not name.endswith("experts.gate_up_proj"):
        return [(name, numbers)]
    stem, half = name.removesuffix("gate_up_proj"), numbers.shape[1] // 2
    return [(f"{stem}gate_proj", numbers[:, :half]), (f"{stem}up_proj", numbers[:, half:])]


def _laid_out(arch: str, config: Any, name: str, numbers: Any) -> Any:
    family = FAMILIES[arch]
    if family.permuted and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        halves = numbers.reshape(heads, 2, -1, *numbers.shape[1:])
        return halves.swapaxes(1, 2).reshape(numbers.shape)
    if family.grouped and "query_key_value" in name:
        each = numbers.reshape(config.num_attention_heads, 3, -1, *numbers.shape[1:])
        return each.swapaxes(0, 1).reshape(numbers.shape)
    if arch == "gpt2" and numbers.ndim == 2 and ".h." in name:
        return numbers.T
    return numbers + family.norm if name.endswith("norm.weight") else numbers
