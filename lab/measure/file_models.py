"""The sizes of today's models, for files with random weights (`files.py`).

Of large models there are only some layers here, with the same share of the vocabulary, so that the
output matrix takes its usual share of a pass.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODELS = Path.home() / ".cache" / "outpace-models"
GEMMA_TOKENS = MODELS / "gemma-3-270m-q4_k_m.gguf"
QWEN_TOKENS = MODELS / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"

Tensors = Iterator[tuple[str, tuple[int, ...]]]
"""Names and shapes, rows of a matrix first."""


@dataclass(frozen=True)
class Model:
    """A file to write."""

    about: str
    arch: str
    layers: int
    hidden: int
    vocabulary: int
    values: dict[str, Any]
    tensors: Any
    """Yields those of one layer, without their "blk.N."."""
    table: float = 0.005
    """The standard deviation of the table of tokens. Where this is the head, too, what layers add
    has to be much more than it, else each token would repeat itself; where it is not, what a token
    is has to outweigh what attention brings of all others."""
    tied: bool = True
    """Whether the head is the table of tokens."""
    kinds: dict[str, str] = field(default_factory=dict)
    """Of matrices, by a part of their names, where a file of the model has others than Q4_K_M."""
    norm: str = "output_norm.weight"
    tokens: Path = QWEN_TOKENS


# -- layers ----------------------------------------------------------------------------------------


def _attention(hidden: int, heads: int, keys: int, size: int, gated: bool = False) -> Tensors:
    yield "attn_q.weight", (heads * size * (1 + gated), hidden)
    yield "attn_k.weight", (keys * size, hidden)
    yield "attn_v.weight", (keys * size, hidden)
    yield "attn_output.weight", (hidden, heads * size)


def _norms(*sizes: tuple[str, int]) -> Tensors:
    for name, size in sizes:
        yield f"{name}.weight", (size,)


def _mlp(hidden: int, width: int, ending: str = "") -> Tensors:
    yield f"ffn_gate{ending}.weight", (width, hidden)
    yield f"ffn_up{ending}.weight", (width, hidden)
    yield f"ffn_down{ending}.weight", (hidden, width)


def _experts(hidden: int, width: int, count: int) -> Tensors:
    yield "ffn_gate_inp.weight", (count, hidden)
    for name, shape in _mlp(hidden, width, "_exps"):
        yield name, (count, *shape)


def _gemma3(layer: int) -> Tensors:
    yield from _norms(("attn_norm", 1152), ("post_attention_norm", 1152))
    yield from _norms(("ffn_norm", 1152), ("post_ffw_norm", 1152))
    yield from _norms(("attn_q_norm", 256), ("attn_k_norm", 256))
    yield from _attention(1152, 4, 1, 256)
    yield from _mlp(1152, 6912)


def _qwen35(layer: int) -> Tensors:
    yield from _norms(("attn_norm", 2048), ("post_attention_norm", 2048))
    if layer % 4 == 3:
        yield from _norms(("attn_q_norm", 256), ("attn_k_norm", 256))
        yield from _attention(2048, 8, 2, 256, gated=True)
    else:
        yield "attn_qkv.weight", (6144, 2048)
        yield "attn_gate.weight", (2048, 2048)
        yield "ssm_alpha.weight", (16, 2048)
        yield "ssm_beta.weight", (16, 2048)
        yield "ssm_conv1d.weight", (6144, 4)
        yield "ssm_a", (16,)
        yield "ssm_dt.bias", (16,)
        yield "ssm_norm.weight", (128,)
        yield "ssm_out.weight", (2048, 2048)
    yield from _mlp(2048, 6144)


LFM2_ATTENDS = (2, 5, 8, 10, 12, 14)


def _lfm2(layer: int) -> Tensors:
    yield from _norms(("attn_norm", 2048), ("ffn_norm", 2048))
    if layer in LFM2_ATTENDS:
        yield from _norms(("attn_q_norm", 64), ("attn_k_norm", 64))
        yield from _attention(2048, 32, 8, 64)
    else:
        yield "shortconv.in_proj.weight", (6144, 2048)
        yield "shortconv.conv.weight", (2048, 3)
        yield "shortconv.out_proj.weight", (2048, 2048)
    yield from _mlp(2048, 8192)


GRANITE_ATTENDS = (5, 15, 25, 35)


def _granite_hybrid(layer: int) -> Tensors:
    yield from _norms(("attn_norm", 1536), ("ffn_norm", 1536))
    if layer in GRANITE_ATTENDS:
        yield from _attention(1536, 12, 4, 128)
    else:
        yield "ssm_in.weight", (2 * 3072 + 2 * 128 + 48, 1536)
        yield "ssm_conv1d.weight", (3072 + 2 * 128, 4)
        yield "ssm_conv1d.bias", (3072 + 2 * 128,)
        yield "ssm_dt.bias", (48,)
        yield "ssm_a", (48, 1)
        yield "ssm_d", (48, 1)
        yield "ssm_norm.weight", (1, 3072)
        yield "ssm_out.weight", (1536, 3072)


def _granite_dense(layer: int) -> Tensors:
    yield from _granite_hybrid(layer)
    yield from _mlp(1536, 4096)


def _granite_experts(layer: int) -> Tensors:
    yield from _granite_hybrid(layer)
    yield from _experts(1536, 512, 64)
    yield from _mlp(1536, 1024, "_shexp")


def _gpt_oss(layer: int) -> Tensors:
    yield from _norms(("attn_norm", 2880), ("post_attention_norm", 2880))
    for name, shape in _attention(2880, 64, 8, 64):
        yield name, shape
        yield name.replace(".weight", ".bias"), shape[:1]
    yield "attn_sinks.weight", (64,)
    for name, shape in _experts(2880, 2880, 32):
        yield name, shape
        yield name.replace(".weight", ".bias"), shape[:-1]


def _qwen3moe(layer: int) -> Tensors:
    yield from _norms(("attn_norm", 2048), ("ffn_norm", 2048))
    yield from _norms(("attn_q_norm", 128), ("attn_k_norm", 128))
    yield from _attention(2048, 32, 4, 128)
    yield from _experts(2048, 768, 128)


def _glm_flash(layer: int) -> Tensors:
    yield from _norms(("attn_norm", 2048), ("ffn_norm", 2048))
    yield from _norms(("attn_q_a_norm", 768), ("attn_kv_a_norm", 512))
    yield "attn_q_a.weight", (768, 2048)
    yield "attn_q_b.weight", (20 * 256, 768)
    yield "attn_kv_a_mqa.weight", (512 + 64, 2048)
    yield "attn_k_b.weight", (20, 512, 192)
    yield "attn_v_b.weight", (20, 256, 512)
    yield "attn_output.weight", (2048, 20 * 256)
    if layer == 0:
        yield from _mlp(2048, 10240)
        return
    yield from _experts(2048, 1536, 64)
    yield "exp_probs_b.bias", (64,)
    yield from _mlp(2048, 1536, "_shexp")


# -- models ----------------------------------------------------------------------------------------


def _heads(heads: int, keys: int | list[int], size: int) -> dict[str, Any]:
    named = ("attention.key_length", "attention.value_length")
    return {
        **dict.fromkeys(named, size),
        "attention.head_count": heads,
        "attention.head_count_kv": keys,
    }


def _granite_values(layers: int) -> dict[str, Any]:
    return {
        **_heads(12, [4 if layer in GRANITE_ATTENDS else 0 for layer in range(layers)], 128),
        "rope.dimension_count": 128,
        "rope.scaling.finetuned": False,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 3072,
        "ssm.state_size": 128,
        "ssm.time_step_rank": 48,
        "ssm.group_count": 1,
        "attention.scale": 0.0078125,
        "embedding_scale": 12.0,
        "residual_scale": 0.22,
        "logit_scale": 6.0,
    }


def _mixture(count: int, used: int, width: int) -> dict[str, Any]:
    return {
        "expert_count": count,
        "expert_used_count": used,
        "expert_feed_forward_length": width,
    }


FILES = {
    "gemma-3-1b": Model(
        "Gemma 3 1B", "gemma3", 26, 1152, 262144,
        {
            **_heads(4, 1, 256),
            "feed_forward_length": 6912,
            "attention.sliding_window": 512,
            "rope.freq_base": 1e6,
        },
        _gemma3, table=0.03, tokens=GEMMA_TOKENS,
    ),
    "qwen3.5-2b": Model(
        "Qwen3.5 2B", "qwen35", 24, 2048, 248320,
        {
            **_heads(8, 2, 256),
            "feed_forward_length": 6144,
            "rope.freq_base": 1e7,
            "rope.dimension_count": 64,
            "rope.dimension_sections": [11, 11, 10, 0],
            "ssm.conv_kernel": 4,
            "ssm.state_size": 128,
            "ssm.group_count": 16,
            "ssm.time_step_rank": 16,
            "ssm.inner_size": 2048,
            "full_attention_interval": 4,
        },
        _qwen35,
    ),
    "lfm2-1.2b": Model(
        "LFM2 1.2B", "lfm2", 16, 2048, 65536,
        {
            **_heads(32, [8 if layer in LFM2_ATTENDS else 0 for layer in range(16)], 64),
            "feed_forward_length": 8192,
            "rope.freq_base": 1e6,
            "shortconv.l_cache": 3,
            "attention.layer_norm_rms_epsilon": 1e-5,
        },
        _lfm2, norm="token_embd_norm.weight",
    ),
    "granite-4-h-1b": Model(
        "Granite 4 H 1B", "granitehybrid", 40, 1536, 100352,
        {**_granite_values(40), "feed_forward_length": 4096},
        _granite_dense,
    ),
    "granite-4-h-tiny": Model(
        "half of Granite 4 H Tiny", "granitehybrid", 20, 1536, 50176,
        {
            **_granite_values(20),
            **_mixture(64, 6, 512),
            "feed_forward_length": 512,
            "expert_shared_feed_forward_length": 1024,
        },
        _granite_experts,
    ),
    "gpt-oss-20b": Model(
        "a sixth of gpt-oss 20B", "gpt-oss", 4, 2880, 33536,
        {
            **_heads(64, 8, 64),
            **_mixture(32, 4, 2880),
            "feed_forward_length": 2880,
            "attention.sliding_window": 128,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 150000.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
        },
        _gpt_oss, table=1.0, tied=False, kinds={"_exps": "MXFP4", "": "Q8_0"},
    ),
    "qwen3-30b-a3b": Model(
        "an eighth of Qwen3 30B A3B", "qwen3moe", 6, 2048, 18992,
        {
            **_heads(32, 4, 128),
            **_mixture(128, 8, 768),
            "feed_forward_length": 6144,
            "rope.freq_base": 1e6,
        },
        _qwen3moe, table=1.0, tied=False,
    ),
    "glm-4.7-flash": Model(
        "an eighth of GLM 4.7 Flash", "deepseek2", 6, 2048, 19360,
        {
            **_heads(20, 1, 576),
            **_mixture(64, 4, 1536),
            "attention.value_length": 512,
            "attention.key_length_mla": 256,
            "attention.value_length_mla": 256,
            "attention.q_lora_rank": 768,
            "attention.kv_lora_rank": 512,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "feed_forward_length": 10240,
            "leading_dense_block_count": 1,
            "expert_shared_count": 1,
            "expert_group_count": 1,
            "expert_group_used_count": 1,
            "expert_gating_func": 2,
            "expert_weights_scale": 1.8,
            "expert_weights_norm": True,
            "rope.dimension_count": 64,
            "rope.freq_base": 1e6,
        },
        _glm_flash, table=1.0, tied=False,
    ),
}  # fmt: skip


def values_of(model: Model) -> dict[str, Any]:
    """Returns the values of a file, by their whole names."""
    own = {
        "context_length": 32768,
        "vocab_size": model.vocabulary,
        "embedding_length": model.hidden,
        "block_count": model.layers,
        "attention.layer_norm_rms_epsilon": 1e-6,
        **model.values,
    }
    return {f"{model.arch}.{name}": value for name, value in own.items()}


def tensors_of(model: Model) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yields name, shape and kind of each tensor."""
    head = _kind_of_rows(model, "Q6_K", model.hidden)
    table = head if model.tied else _kind_of_rows(model, "Q4_K", model.hidden)
    yield "token_embd.weight", (model.vocabulary, model.hidden), table
    yield model.norm, (model.hidden,), "F32"
    if not model.tied:
        yield "output.weight", (model.vocabulary, model.hidden), head
    for layer in range(model.layers):
        for name, shape in model.tensors(layer):
            yield f"blk.{layer}.{name}", shape, _kind(model, layer, name, shape)


PLAIN = ("ffn_gate_inp.weight", "conv1d.weight", "conv.weight", "ssm_norm.weight", "ssm_a", "ssm_d")


def _kind(model: Model, layer: int, name: str, shape: tuple[int, ...]) -> str:
    """The kind of a layer's tensor: llama.cpp's choice for Q4_K_M."""
    if len(shape) == 1 or name.endswith((".bias", *PLAIN)):
        return "F32"
    own = next((kind for part, kind in model.kinds.items() if part in name), None)
    if own is not None:
        return own
    eighth = model.layers // 8
    many = layer < eighth or layer >= 7 * model.layers // 8 or (layer - eighth) % 3 == 2
    if many and name.startswith(("attn_v.", "ffn_down")):
        return _kind_of_rows(model, "Q6_K", shape[-1])
    return _kind_of_rows(model, "Q5_K" if name == "attn_qkv.weight" else "Q4_K", shape[-1])


INSTEAD = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""What llama.cpp takes for rows that blocks of 256 do not divide."""


def _kind_of_rows(model: Model, kind: str, inputs: int) -> str:
    return model.kinds.get("", kind if inputs % 256 == 0 else INSTEAD[kind])
