"""Kinds of published EAGLE-3 heads: names of weights, entries, parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from heads.published import OWN, SIZE, VOCABULARY, Change, Weights, drawn, eagle3

LAYERS = "eagle_aux_hidden_state_layer_ids"
READS = (2, 6, 9)
"""What the tests' heads read of a target with twelve layers: its usual states."""

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "factor": 40.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.5,
    "original_max_position_embeddings": 16,
}
MROPE = {"type": "mrope", "mrope_section": [1, 1, 0]}


def say(**more: object) -> Change:
    return lambda about, weights: about.update(more)


def nested(*ids: int, **more: object) -> Change:
    return say(eagle_config={LAYERS: list(ids), "use_aux_hidden_state": True, **more})


def give(**shapes: tuple[int, ...]) -> Change:
    """Gives weights, with ``__`` for each dot in their names."""
    return lambda about, weights: weights.update(
        drawn({name.replace("__", "."): shape for name, shape in shapes.items()})
    )


def drop(*names: str) -> Change:
    def change(about: dict[str, Any], weights: Weights) -> None:
        for name in names:
            del weights[name]

    return change


def both(*changes: Change) -> Change:
    def change(about: dict[str, Any], weights: Weights) -> None:
        for each in changes:
            each(about, weights)

    return change


def renamed(old: str, new: str) -> Change:
    def change(about: dict[str, Any], weights: Weights) -> None:
        for name in [name for name in weights if name.startswith(old)]:
            weights[new + name[len(old) :]] = weights.pop(name)

    return change


def below_model(about: dict[str, Any], weights: Weights) -> None:
    """NeMo's names: all but the output matrix and the maps below ``model``."""
    for name in [name for name in weights if name not in ("lm_head.weight", "d2t", "t2d")]:
        weights["model." + name] = weights.pop(name)


def whole(about: dict[str, Any], weights: Weights) -> None:
    """It knows all tokens."""
    del about["draft_vocab_size"], weights["d2t"], weights["t2d"], weights["lm_head.weight"]


LATENT = {
    "q_lora_rank": 6,
    "kv_lora_rank": 5,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 6,
    "v_head_dim": 3,
}


def latent(about: dict[str, Any], weights: Weights) -> None:
    """DeepSeek's attention, as of lightseekorg/kimi-k2.5-eagle3-mla, with some of its entries."""
    about |= {**LATENT, "architectures": ["Eagle3DeepseekV2ForCausalLM"], "head_dim": 128}
    about |= {"model_type": "kimi_k2", "num_key_value_heads": 2, "moe_layer_freq": 1}
    drop(*(f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"))(about, weights)
    sizes = {
        "q_a_proj": (6, 2 * SIZE),
        "q_a_layernorm": (6,),
        "q_b_proj": (2 * 10, 6),
        "kv_a_proj_with_mqa": (5 + 6, 2 * SIZE),
        "kv_a_layernorm": (5,),
        "kv_b_proj": (2 * 7, 5),
        "o_proj": (SIZE, 2 * 3),
    }
    shapes = {f"midlayer__self_attn__{name}__weight": shape for name, shape in sizes.items()}
    give(**shapes)(about, weights)


def latent_only_of_keys(about: dict[str, Any], weights: Weights) -> None:
    latent(about, weights)
    about["q_lora_rank"] = None
    names = ("q_a_proj", "q_a_layernorm", "q_b_proj")
    drop(*(f"midlayer.self_attn.{name}.weight" for name in names))(about, weights)
    give(midlayer__self_attn__q_proj__weight=(2 * 10, 2 * SIZE))(about, weights)


def eagle4(about: dict[str, Any], weights: Weights) -> None:
    """NeMo Automodel's names: a windowed layer, and a head that finds candidates."""
    about |= {"architectures": ["LlamaForCausalLMEagle4"], "sliding_window": 3}
    about["draft_vocab_size"] = VOCABULARY
    drop("d2t", "t2d", "lm_head.weight")(about, weights)
    give(
        embed_tokens__weight=(VOCABULARY, SIZE),
        lm_head__weight=(VOCABULARY, SIZE),
        efficient_lm_head__weight=(VOCABULARY, 3),
        efficient_lm_head_down_proj__weight=(3, SIZE),
    )(about, weights)
    renamed("midlayer.", "layers.0.")(about, weights)


BIASES = {
    f"midlayer__self_attn__{name}_proj__bias": (SIZE // 2 if name in "kv" else SIZE,)
    for name in "qkvo"
}
MASKED = both(
    say(mask_token_id=17, pard_token=17),
    lambda about, weights: weights.update(
        {"mask_hidden": torch.randn(1, 1, 3 * SIZE).to(torch.bfloat16)}
    ),
)
EMBEDDING = give(embed_tokens__weight=(VOCABULARY, SIZE))

CHANGES: Mapping[str, Change] = {
    "usual layers": say(),
    "nested": nested(2, 5, 8),
    "outputs of layers": nested(1, 5, 8),
    "outputs of layers, not nested": say(**{LAYERS: [1, 5, 8]}),
    "states, not nested": say(**{LAYERS: [0, 5, 11]}),
    "vLLM": both(say(architectures=["Eagle3LlamaForCausalLM"]), renamed("midlayer.", "layers.0.")),
    "NeMo": both(
        EMBEDDING,
        say(architectures=["LlamaEagle3DraftModel"], num_hidden_layers=12),
        say(layer_types=["full_attention"] * 12, target_hidden_size=SIZE),
        renamed("midlayer.", "layers.0."),
        below_model,
    ),
    "DeepSpec": both(
        EMBEDDING,
        drop("d2t", "t2d", "lm_head.weight"),
        give(
            lm_head__weight=(VOCABULARY, SIZE),
            midlayer__self_attn__q_norm__weight=(SIZE // 2,),
            midlayer__self_attn__k_norm__weight=(SIZE // 2,),
        ),
        say(architectures=["Qwen3Eagle3Model"], target_layer_ids=[1, 5, 10], ttt_length=5),
        say(draft_vocab_size=None, layer_types=["full_attention"], num_target_layers=12),
        renamed("midlayer.", "layers.0."),
    ),
    "number of layers copied": say(num_hidden_layers=36),
    "norm before residual": say(norm_before_residual=True),
    "norm before fc": both(say(norm_before_fc=True), give(input_norm__weight=(3 * SIZE,))),
    "norm before fc, nested": both(
        nested(4, 6, 11, norm_before_fc=True), give(input_norm__weight=(3 * SIZE,))
    ),
    "3.1": both(
        say(fc_norm=True, norm_output=True),
        give(fc_norm__0__weight=(SIZE,), fc_norm__1__weight=(SIZE,), fc_norm__2__weight=(SIZE,)),
    ),
    "norm of the output": say(norm_output=True),
    "llama3": say(rope_scaling=LLAMA3),
    "yarn": say(rope_scaling=YARN, max_position_embeddings=640),
    "linear": say(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}),
    "mrope": say(rope_scaling=MROPE),
    "part of a head turns": say(partial_rotary_factor=0.5),
    "biases": both(say(attention_bias=True), give(fc__bias=(SIZE,), **BIASES)),
    "queries and keys normalised": give(
        midlayer__self_attn__q_norm__weight=(SIZE // 2,),
        midlayer__self_attn__k_norm__weight=(SIZE // 2,),
    ),
    "window": say(layer_types=["sliding_attention"], sliding_window=3, use_sliding_window=True),
    "the target's output matrix": whole,
    "tied": both(whole, EMBEDDING, say(tie_word_embeddings=True)),
    "one state as it is": both(
        drop("fc.weight"), say(eagle_config={"use_aux_hidden_state": False})
    ),
    "P-EAGLE": MASKED,
    "latent": both(latent, nested(1, 5, 8), say(rope_scaling=YARN, max_position_embeddings=640)),
    "latent, layers.0": both(latent_only_of_keys, renamed("midlayer.", "layers.0.")),
}
CHANGES = {
    **CHANGES,
    "latent, 3.1": both(latent, CHANGES["3.1"]),
    "EAGLE-4": both(CHANGES["3.1"], eagle4),
}
MAKERS: Mapping[str, Callable[[Path], Weights]] = {
    **{
        name: lambda folder, change=change: eagle3(folder, change)
        for name, change in CHANGES.items()
    },
    "wider": lambda folder: eagle3(folder, size=12),
    "narrower, 3.1": lambda folder: eagle3(folder, CHANGES["3.1"], size=4),
    "two states": lambda folder: eagle3(folder, nested(3, 10), states=2),
    "the last layer": lambda folder: eagle3(folder, nested(4, 8, 12)),
    "five states": lambda folder: eagle3(folder, nested(1, 3, 5, 7, 10), states=5),
    "three layers": lambda folder: eagle3(folder, layers=3),
    "three layers, windows": lambda folder: eagle3(
        folder,
        say(
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            sliding_window=3,
        ),
        layers=3,
    ),
    "P-EAGLE, four layers": lambda folder: eagle3(
        folder, both(MASKED, say(architectures=["PEagleDraftModel"])), layers=4
    ),
    "P-EAGLE, windows": lambda folder: eagle3(
        folder,
        both(MASKED, say(layer_types=["full_attention", "sliding_attention"], sliding_window=4)),
        layers=2,
    ),
}
"""What makes a folder with each of them."""
assert OWN < VOCABULARY
