"""Folders of tiny heads in published formats, made from these formats' public descriptions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from outpace.heads.base import TargetShape

SIZE, VOCABULARY, OWN, RANK = 8, 20, 6, 5
TOKENS = [3, 4, 7, 11, 12, 19]
TARGET = TargetShape(hidden_size=SIZE, vocab_size=VOCABULARY, layers=12, name="tiny")
Weights = dict[str, Tensor]
Change = Callable[[dict[str, Any], Weights], object]

EAGLE3_CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": SIZE,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "vocab_size": VOCABULARY,
    "draft_vocab_size": OWN,
    "torch_dtype": "bfloat16",
}


def drawn(shapes: Mapping[str, tuple[int, ...]]) -> Weights:
    torch.manual_seed(0)
    return {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


def nothing(about: dict[str, Any], weights: Weights) -> None:
    """No change."""


def decoder_layer(prefix: str, size: int, inputs: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a Llama layer with two heads in one group; inputs: what its attention reads."""
    half = size // 2
    return {
        prefix + "input_layernorm.weight": (size,),
        prefix + "post_attention_layernorm.weight": (size,),
        prefix + "self_attn.q_proj.weight": (size, inputs),
        prefix + "self_attn.k_proj.weight": (half, inputs),
        prefix + "self_attn.v_proj.weight": (half, inputs),
        prefix + "self_attn.o_proj.weight": (size, size),
        prefix + "mlp.gate_proj.weight": (24, size),
        prefix + "mlp.up_proj.weight": (24, size),
        prefix + "mlp.down_proj.weight": (size, 24),
    }


def eagle3(
    folder: Path, change: Change = nothing, *, size: int = SIZE, states: int = 3, layers: int = 1
) -> Weights:
    """size: its own width; states: how many it joins; layers: its own."""
    about = {**EAGLE3_CONFIG, "hidden_size": size}
    weights = drawn(
        {
            "fc.weight": (size, states * SIZE),
            "midlayer.hidden_norm.weight": (size,),
            **decoder_layer("midlayer.", size, 2 * size),
            "norm.weight": (size,),
            "lm_head.weight": (OWN, size),
        }
    )
    if layers > 1:
        about["num_hidden_layers"] = layers
        for at in range(1, layers):
            weights |= drawn(decoder_layer(f"layers.{at}.", size, size))
    if size != SIZE:
        about["target_hidden_size"] = SIZE
        weights |= drawn({"embed_tokens.weight": (VOCABULARY, size)})
    weights["d2t"] = torch.tensor(TOKENS) - torch.arange(OWN)
    weights["t2d"] = torch.tensor([token in TOKENS for token in range(VOCABULARY)])
    change(about, weights)
    return put(folder, about, weights, "model.safetensors")


EAGLE_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "bias": True,
    **{name: EAGLE3_CONFIG[name] for name in ("hidden_size", "intermediate_size", "vocab_size")},
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "bfloat16",
}


def eagle(folder: Path, change: Change = nothing) -> Weights:
    about = dict(EAGLE_CONFIG)
    layer, half = "layers.0.", SIZE // 2
    weights = drawn(
        {
            "embed_tokens.weight": (VOCABULARY, SIZE),
            "fc.weight": (SIZE, 2 * SIZE),
            "fc.bias": (SIZE,),
            layer + "post_attention_layernorm.weight": (SIZE,),
            layer + "self_attn.q_proj.weight": (SIZE, SIZE),
            layer + "self_attn.k_proj.weight": (half, SIZE),
            layer + "self_attn.v_proj.weight": (half, SIZE),
            layer + "self_attn.o_proj.weight": (SIZE, SIZE),
            layer + "mlp.gate_proj.weight": (24, SIZE),
            layer + "mlp.up_proj.weight": (24, SIZE),
            layer + "mlp.down_proj.weight": (SIZE, 24),
        }
    )
    change(about, weights)
    return put(folder, about, weights, "model.safetensors")


DFLASH_CONFIG = {
    **{name: EAGLE_CONFIG[name] for name in ("hidden_size", "intermediate_size", "vocab_size")},
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "layer_types": ["full_attention"] * 2,
    "torch_dtype": "bfloat16",
    "block_size": 4,
    "num_target_layers": 12,
    "dflash_config": {"mask_token_id": 17, "target_layer_ids": [1, 5, 11]},
}


def dflash(folder: Path, change: Change = nothing) -> Weights:
    about = {**DFLASH_CONFIG, "dflash_config": dict(DFLASH_CONFIG["dflash_config"])}
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (SIZE, 3 * SIZE),
        "hidden_norm.weight": (SIZE,),
        "norm.weight": (SIZE,),
    }
    for layer in ("layers.0.", "layers.1."):
        shapes |= {
            layer + "input_layernorm.weight": (SIZE,),
            layer + "post_attention_layernorm.weight": (SIZE,),
            layer + "self_attn.q_norm.weight": (6,),
            layer + "self_attn.k_norm.weight": (6,),
            layer + "self_attn.q_proj.weight": (12, SIZE),
            layer + "self_attn.k_proj.weight": (6, SIZE),
            layer + "self_attn.v_proj.weight": (6, SIZE),
            layer + "self_attn.o_proj.weight": (SIZE, 12),
            layer + "mlp.gate_proj.weight": (24, SIZE),
            layer + "mlp.up_proj.weight": (24, SIZE),
            layer + "mlp.down_proj.weight": (SIZE, 24),
        }
    weights = drawn(shapes)
    change(about, weights)
    return put(folder, about, weights, "model.safetensors")


DSPARK_CONFIG = {
    **DFLASH_CONFIG,
    "architectures": ["DSparkDraftModel"],
    "dflash_config": {
        "attention_mode": "gqa",
        "confidence_head_alpha": 1.0,
        "confidence_head_with_markov": True,
        "enable_confidence_head": True,
        "markov_head_type": "vanilla",
        "markov_rank": RANK,
        "mask_token_id": 17,
        "projector_type": "dspark",
        "target_layer_ids": [1, 5, 10],
    },
}
"""SpecForge's."""


def dspark(folder: Path, change: Change = nothing, kind: str = "vanilla") -> Weights:
    """kind: of the Markov head."""

    def joined(about: dict[str, Any], weights: Weights) -> None:
        inside = {**DSPARK_CONFIG["dflash_config"], "markov_head_type": kind}
        about |= {**DSPARK_CONFIG, "dflash_config": inside}
        shapes: dict[str, tuple[int, ...]] = {
            "markov_head.markov_w1.weight": (VOCABULARY, RANK),
            "markov_head.markov_w2.weight": (VOCABULARY, RANK),
            "confidence_head.proj.weight": (1, SIZE + RANK),
            "confidence_head.proj.bias": (1,),
        }
        if kind == "gated":
            shapes |= {"markov_head.gate_proj.weight": (RANK, SIZE + RANK),
                       "markov_head.gate_proj.bias": (RANK,)}  # fmt: skip
        if kind == "rnn":
            shapes |= {"markov_head.joint_proj.weight": (3 * RANK, SIZE + 2 * RANK),
                       "markov_head.joint_proj.bias": (3 * RANK,)}  # fmt: skip
        weights |= drawn(shapes)
        change(about, weights)

    return dflash(folder, joined)


DOMINO = {
    "mask_token_id": 17,
    "target_layer_ids": [1, 5, 10],
    "projector_type": "domino",
    "pure_draft_prefix_len": 1,
    "emb_dim": RANK,
    "gru_hidden_dim": 7,
    "shift_label": True,
}
"""SpecForge's."""


def domino(folder: Path, change: Change = nothing) -> Weights:
    def joined(about: dict[str, Any], weights: Weights) -> None:
        about |= {"architectures": ["DominoDraftModel"], "dflash_config": dict(DOMINO)}
        shapes = {
            "prefix_gru.weight_ih_l0": (3 * 7, SIZE),
            "prefix_gru.weight_hh_l0": (3 * 7, 7),
            "embed_proj.0.weight": (RANK, SIZE + 7),
            "embed_proj.2.weight": (VOCABULARY, RANK),
        }
        weights |= drawn(shapes)
        change(about, weights)

    return dflash(folder, joined)


def of_library(kind: str, given: Weights, about: Mapping[str, Any]) -> tuple[Weights, dict]:
    """What the library `speculators` would make of a head of the same kind."""
    names = {"eagle": {"fc.": "fusion_fc.", "layers.0.": "transformer."},
             "eagle3": {"midlayer.": "layers.0."}}[kind]  # fmt: skip
    weights = {}
    for name, value in given.items():
        old = next((old for old in names if name.startswith(old)), "")
        weights[(names[old] + name[len(old) :]) if old else name] = value
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
    inside = {"algorithm": kind, "proposal_methods": [proposal],
              "default_proposal_method": "greedy",
              "verifier": {"name_or_path": "a/model", "architectures": []}}  # fmt: skip
    above = {"speculators_model_type": kind, "speculators_version": "0.3.0",
             "speculators_config": inside}  # fmt: skip
    above["draft_vocab_size"] = about.get("draft_vocab_size")
    layer = {name: value for name, value in about.items() if name not in ("architectures", "bias")}
    return weights, {**above, "transformer_layer_config": layer}


def speculators_eagle3(folder: Path, change: Change = nothing) -> Weights:
    weights, about = of_library("eagle3", eagle3(folder), EAGLE3_CONFIG)
    about["norm_before_residual"] = True
    change(about, weights)
    return put(folder, about, weights, "model.safetensors")


def speculators_eagle(folder: Path, change: Change = nothing) -> Weights:
    given = eagle(folder)
    del given["embed_tokens.weight"]
    weights, about = of_library("eagle", given, EAGLE_CONFIG)
    change(about, weights)
    return put(folder, about, weights, "model.safetensors")


def mlp_speculator(folder: Path, change: Change = nothing) -> Weights:
    about = {"model_type": "mlp_speculator", "emb_dim": SIZE, "inner_dim": 6, "n_predict": 3,
             "vocab_size": VOCABULARY, "tie_weights": True, "scale_input": True}  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "speculator.emb.0.weight": (VOCABULARY, 6),
        "speculator.proj.0.weight": (6, SIZE),
        "speculator.proj.1.weight": (6, 6),
        "speculator.ln.0.weight": (6,),
        "speculator.ln.0.bias": (6,),
        "speculator.head.0.weight": (VOCABULARY, 6),
    }
    weights = drawn(shapes)
    change(about, weights)
    return put(folder, about, weights, "model.safetensors")


def medusa(folder: Path, change: Change = nothing) -> Weights:
    about = {
        "medusa_num_heads": 2,
        "medusa_num_layers": 1,
        "base_model_name_or_path": "a/model",
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(3):  # one more than the configuration says, as in some published files
        shapes[f"{head}.0.linear.weight"] = (SIZE, SIZE)
        shapes[f"{head}.0.linear.bias"] = (SIZE,)
        shapes[f"{head}.1.weight"] = (VOCABULARY, SIZE)
    weights = drawn(shapes)
    change(about, weights)
    return put(folder, about, weights, "medusa_lm_head.safetensors")


def put(folder: Path, about: Mapping[str, Any], weights: Weights, file: str) -> Weights:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(about))
    save_file(weights, folder / file)
    return weights


MAKERS = {"eagle": eagle, "eagle3": eagle3, "dflash": dflash, "dspark": dspark, "medusa": medusa,
          "mlp_speculator": mlp_speculator}  # fmt: skip
LIBRARY = {"eagle": speculators_eagle, "eagle3": speculators_eagle3}
FILES = {name: "model.safetensors" for name in MAKERS} | {"medusa": "medusa_lm_head.safetensors"}
