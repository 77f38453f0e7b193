"""Tiny models in float64 whose weights follow from their names: no generator of torch's, no order
of layers and no version of transformers decides what they are."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

VOCABULARY = 32
CONTEXT = 160
HIDDEN = 24
SHARP = ("lm_head", "q_proj", "k_proj")
"""Weights that are larger still, so that what stood before matters."""

BASE: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
EXPERTS: Mapping[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
SEQ2SEQ: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": HIDDEN,
    "eos_token_id": None,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Family:
    """A configuration class, what it needs beyond the base, and how large the weights are."""

    config: str
    options: Mapping[str, Any] = field(default_factory=dict)
    base: Mapping[str, Any] = field(default_factory=lambda: BASE)
    spread: float = 0.12
    """The weights' standard deviation. With the usual one, all tokens are about equally probable
    whatever the text is."""
    attention: str | None = None
    seq2seq: bool = False


FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaConfig"),
    "gpt2": Family(
        "GPT2Config", {"n_embd": HIDDEN, "n_layer": 2, "n_head": 2, "n_inner": 32}, spread=0.3
    ),
    "mistral": Family("MistralConfig", {"sliding_window": 6}),
    "gemma2": Family(
        "Gemma2Config",
        {
            "head_dim": 8,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        attention="eager",
    ),
    "qwen3_moe": Family("Qwen3MoeConfig", {**EXPERTS, "head_dim": 8}),
    "bloom": Family("BloomConfig", {"n_layer": 2, "n_head": 2}, spread=0.25),
    "mamba2": Family(
        "Mamba2Config",
        {"state_size": 8, "num_heads": 6, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    ),
    "qwen3_next": Family(
        "Qwen3NextConfig",
        {
            **EXPERTS,
            "head_dim": 8,
            "shared_expert_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    "t5": Family(
        "T5Config",
        {"d_kv": 8, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2},
        base=SEQ2SEQ,
        spread=0.5,
        seq2seq=True,
    ),
    "bart": Family(
        "BartConfig",
        {
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "max_position_embeddings": CONTEXT,
            "forced_eos_token_id": None,
        },
        base=SEQ2SEQ,
        seq2seq=True,
    ),
}


@cache
def model(family: str) -> Any:
    """Returns the family's model. It is shared: do not change it."""
    one = FAMILIES[family]
    config = getattr(transformers, one.config)(**{**one.base, **one.options})
    kind: Any = transformers.AutoModelForCausalLM
    if one.seq2seq:
        kind = transformers.AutoModelForSeq2SeqLM
    # The grouped kernels of the mixtures of experts know no float64.
    kernels = {"attn_implementation": one.attention, "experts_implementation": "eager"}
    made = kind.from_config(config, dtype=torch.float64, **kernels).eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            weight.copy_(_weight(name, weight, one.spread))
    return made.requires_grad_(False)


@cache
def draft_model(family: str, noise: float = 0.05) -> Any:
    """Returns a copy of the family's model that is a little off, so that it is right at times."""
    other = copy.deepcopy(model(family))
    for name, weight in other.named_parameters():
        spread = float(weight.std()) if weight.dim() > 1 else 0.1
        weight.add_(numbers(f"noise of {name}", weight.shape) * spread * noise)
    return other


def numbers(name: str, shape: tuple[int, ...]) -> Tensor:
    """Returns normal numbers that follow from a name. ``RandomState`` draws the same ones in every
    version of numpy."""
    drawn = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(tuple(shape))
    return torch.from_numpy(np.asarray(drawn, dtype=np.float64))


def _weight(name: str, weight: Tensor, spread: float) -> Tensor:
    last = name.rpartition(".")[2]
    if last == "A_log":  # decays of a recurrent layer
        return torch.linspace(0.0, 2.0, weight.numel(), dtype=torch.float64).view_as(weight)
    if last == "dt_bias":
        return torch.linspace(-2.0, 0.0, weight.numel(), dtype=torch.float64).view_as(weight)
    if weight.dim() < 2:
        centre = 1.0 if last == "weight" or last == "D" else 0.0
        return centre + 0.1 * numbers(name, weight.shape)
    if "conv1d" in name:
        return 0.5 * numbers(name, weight.shape)
    sharp = 4 if any(part in name for part in SHARP) else 1
    return spread * sharp * numbers(name, weight.shape)
