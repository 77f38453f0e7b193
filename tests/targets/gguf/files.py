"""GGUF files of tiny random models, written as llama.cpp's converter writes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType

from targets.families import BASE
from targets.gguf.tiny_families import FAMILIES, WIDE
from targets.gguf.words import VOCABULARY, vocabulary

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
    "mamba.dt_bias": "ssm_dt",
    "mlp.gate.e_score_correction_bias": "exp_probs_b",
}
"""Weights of layers that the library's table of names leaves out."""
SCALES = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ1_M": (),
    "NVFP4": (),
}  # fmt: skip
"""Where the scales of a block are that are float16; at its beginning, where nothing is said."""
BY_HEAD = ("ssm_a", "ssm_d", "ssm_norm.weight")
"""Tensors of Mamba-2 that keep a dimension of 1."""
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
    kinds: Mapping[str, str] | None = None,
    changes: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
    without: Collection[str] = (),
    tokens: bool = True,
    alignment: int | None = None,
) -> Path:
    """Writes a model to a file; matrices in the kind, where blocks of it divide them.

    kinds: of single tensors, instead. changes: other values, None for those to leave out. tensors:
    more of them, as arrays. without: tensors to leave out. tokens: whether it holds a tokenizer.
    alignment: of its tensors, in bytes.
    """
    writer = gguf.GGUFWriter(path, FAMILIES[arch].arch or arch)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    found = {**_values(arch, model.config), **(vocabulary() if tokens else {}), **(changes or {})}
    for name, value in found.items():
        _add(writer, name, value)
    for name, numbers in {**_tensors(arch, model), **(tensors or {})}.items():
        if name not in without:
            _add_tensor(writer, name, numbers, (kinds or {}).get(name, kind))
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


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    add: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
        str: writer.add_string, list: writer.add_array,
    }  # fmt: skip
    if value is not None:
        add[type(value)](name, value)


def _add_tensor(writer: gguf.GGUFWriter, name: str, numbers: Any, kind: str) -> None:
    chosen = _kind_of(name, numbers, kind)
    if not name.endswith(BY_HEAD):
        numbers = numbers.squeeze()  # as the converter does
    raw = in_kind(np.ascontiguousarray(numbers, np.float32), chosen)
    writer.add_tensor(name, raw, raw_shape=raw.shape, raw_dtype=chosen)


def _kind_of(name: str, numbers: Any, kind: str) -> GGMLQuantizationType:
    chosen = GGMLQuantizationType[kind]
    size, _ = gguf.GGML_QUANT_SIZES[chosen]
    plain = (
        name.endswith(".bias")
        or numbers.ndim == 1
        or numbers.shape[-1] % size
        or "ffn_gate_inp" in name
        or "ssm_a" in name
        or "norm" in name
    )
    return GGMLQuantizationType.F32 if plain else chosen


def rounded(arch: str, model: Any, kind: str) -> Any:
    """Rounds a model's weights as a file of the kind does, where families hold them row by row as
    the model does. Returns the model."""
    for name, weight in _weights(model):
        numbers = weight.detach().numpy()
        if FAMILIES[arch].apart and name.endswith("kv_b_proj.weight"):
            keys, values = (
                _dequantized(f"{part}.weight", piece, kind)
                for part, piece in _of_latents(model.config, name, numbers)
            )
            both = np.concatenate([keys.swapaxes(1, 2), values], 1)
            weight.data = torch.from_numpy(both.reshape(numbers.shape))
            continue
        theirs = next(iter(_of_weight(arch, model.config, name, numbers)))
        turned = FAMILIES[arch].turned and numbers.ndim == 3
        numbers = np.ascontiguousarray(numbers.swapaxes(1, 2)) if turned else numbers
        found = torch.from_numpy(_dequantized(theirs, numbers, kind))
        weight.data = found.transpose(1, 2).contiguous() if turned else found
    return model


def _dequantized(name: str, numbers: Any, kind: str) -> Any:
    """Returns what is left of the numbers of a tensor."""
    chosen = _kind_of(name, numbers, kind)
    raw = gguf.quants.quantize(np.ascontiguousarray(numbers), chosen)
    dequantized = gguf.quants.dequantize(raw, chosen)
    return np.array(dequantized, np.float32).reshape(numbers.shape)


def in_kind(numbers: Any, kind: GGMLQuantizationType) -> Any:
    """Returns numbers in a kind; random blocks of their size where the library writes none."""
    try:
        return gguf.quants.quantize(numbers, kind)
    except NotImplementedError:
        size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(0)
    blocks = generator.integers(0, 256, (numbers.size // size, nbytes), np.uint8)
    for place in SCALES.get(kind.name, (0,)):
        few = generator.uniform(1e-4, 1e-3, (len(blocks), 1)).astype(np.float16)
        blocks[:, place : place + 2] = few.view(np.uint8)
    if kind.name == "IQ1_M":  # whose scale is in the highest bits of its last four numbers
        blocks[:, 49::2] &= 0x0F
        blocks[:, 55] |= 0x10
    if kind.name == "NVFP4":
        blocks[:, :4] = generator.integers(1, 16, (len(blocks), 4), np.uint8)
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
    pieces = _split(name, numbers, FAMILIES[arch].turned)
    if FAMILIES[arch].apart and name.endswith("kv_b_proj.weight"):
        pieces = _of_latents(config, name, numbers)
    for part, piece in pieces:
        stem, dot, suffix = part.rpartition(".")
        stem, suffix = (stem, dot + suffix) if suffix in ("weight", "bias") else (part, ".weight")
        theirs = table.get_name(stem) or _extra(stem)
        suffix = "" if part.endswith(ALONE) else suffix
        biases = ("expert_bias", "dt_bias", "correction_bias")
        suffix = ".bias" if part.endswith(biases) else suffix
        if getattr(config, "num_local_experts", None) == 0:  # no experts for it to stand next to
            theirs = theirs.replace("_shexp", "")
        found[theirs + suffix] = _laid_out(arch, config, name, piece)
    return found


def _of_latents(config: Any, name: str, numbers: Any) -> list[tuple[str, Any]]:
    """What makes keys, the other way round, and what makes values."""
    heads = numbers.reshape(config.num_attention_heads, -1, numbers.shape[-1])
    keys, values = np.split(heads, [config.qk_nope_head_dim], axis=1)
    names = (name.replace("kv_b_proj", part) for part in ("k_b_proj", "v_b_proj"))
    return list(zip(names, (keys.swapaxes(1, 2), values), strict=True))


def _extra(stem: str) -> str:
    if stem == "transformer.word_embeddings_layernorm":
        return "token_embd_norm"
    match = re.fullmatch(r"\w+\.\w+\.(\d+)\.(.*)", stem)
    assert match is not None, stem
    return f"blk.{match[1]}.{EXTRA[match[2]]}"


def _split(name: str, numbers: Any, turned: bool) -> list[tuple[str, Any]]:
    held = re.fullmatch(r"(.*experts\.)(gate_up|down)_proj(_bias)?", name) if turned else None
    if held is not None:
        stem, which, bias = held.groups()
        rows = numbers if bias else numbers.swapaxes(1, 2)
        ending = ".bias" if bias else ".weight"
        if which == "down":
            return [(f"{stem}down_proj{ending}", rows)]
        parts = {"gate": rows[:, 0::2], "up": rows[:, 1::2]}
        return [(f"{stem}{part}_proj{ending}", half) for part, half in parts.items()]
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
        numbers = -np.exp(numbers)
    if "mamba." in name and name.endswith(ALONE):
        return numbers[:, None]
    if "mamba.norm" in name:
        return numbers.reshape(config.mamba_n_groups, -1)
    if name.endswith("A_log"):
        return numbers
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
