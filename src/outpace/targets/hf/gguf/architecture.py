"""The configuration that transformers needs, from the values of a GGUF file.

Names are translated by transformers' own tables. What those leave out, a configuration would take
from its defaults, which are those of one checkpoint: it is set here from the file, or as llama.cpp
sets it where a file says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig
from transformers.integrations import ggml

from outpace.core.values import shown
from outpace.errors import ModelLoadError, UnsupportedModel
from outpace.targets.hf.gguf.file import GGUFModel, printable_reason
from outpace.targets.hf.gguf.rotary import rotary_options
from outpace.targets.hf.gguf.vocabulary import token_id

TABLES: Any = ggml.GGUF_CONFIG_MAPPING
"""transformers' names for llama.cpp's values, by type of model."""
DEFAULTS: Mapping[str, Mapping[str, Any]] = ggml.GGUF_CONFIG_DEFAULTS_MAPPING

MODEL_TYPES = {
    "falcon": "falcon",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "gpt2": "gpt2",
    "llama": "llama",
    "nemotron": "nemotron",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
}
"""Architectures that are read, as llama.cpp and as transformers calls them."""

TABLE_NAMES = {"gemma3_text": "gemma3"}
"""Types that transformers' tables call otherwise."""

NEEDED = ("context_length", "embedding_length", "block_count", "attention.head_count")
"""Values without which a configuration would be a guess."""

MORE = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Values that transformers' tables leave out."""

FACTORS = ("logit_scale", "residual_scale", "embedding_scale")
"""Factors of some families, such as Granite, that the families read here do not have: 1 changes
nothing, 0 stands for none."""


def check_architecture(model: GGUFModel) -> None:
    """Raises ``UnsupportedModel`` for a family that is not read, ``ModelLoadError`` for a value
    that is no number."""
    if model.architecture not in MODEL_TYPES:
        raise UnsupportedModel(
            f"{model.path} holds a model of architecture {shown(model.architecture)}, and outpace "
            f"reads GGUF files of {', '.join(MODEL_TYPES)}: use the model's Hugging Face folder "
            "instead, which has a config.json and *.safetensors files."
        )
    if model.of_family("attention.causal") is False:
        raise UnsupportedModel(
            f"{model.path} holds a model that reads texts both ways (attention.causal is false), "
            "as models of embeddings do, and that writes none: use a language model."
        )
    if model.architecture == "llama" and model.number("expert_count"):
        raise UnsupportedModel(
            f"{model.path} holds a Mixtral (a llama with experts), whose GGUF files are not read: "
            "use the model's Hugging Face folder instead."
        )
    if model.architecture == "falcon" and model.number("attention.head_count_kv") not in (None, 1):
        raise UnsupportedModel(
            f"{model.path} holds a Falcon with several key heads, whose GGUF files are not read: "
            "use the model's Hugging Face folder instead."
        )


def _check_factors(model: GGUFModel) -> None:
    """Raises ``UnsupportedModel`` for a factor that the layers of this family would leave out."""
    unread = [name for name in FACTORS if model.number(name) not in (None, 0, 1)]
    # Gemma has factors of its own, which its configuration says (`_gemma`).
    scale = None if model.architecture.startswith("gemma") else model.number("attention.scale")
    if scale and not math.isclose(scale, model.head_size**-0.5, rel_tol=1e-4):
        unread.append("attention.scale")
    if unread:
        raise UnsupportedModel(
            f"{model.path} says that its {unread[0]} is {model.number(unread[0]):g}, which is not "
            f"read for models of architecture {model.architecture!r}: use the model's Hugging Face "
            "folder instead."
        )


def _check_experts(model: GGUFModel) -> None:
    """Raises ``ModelLoadError`` unless a mixture uses some of the experts that it has."""
    count, used = model.number("expert_count"), model.number("expert_used_count")
    if count and not (used and 0 < used <= count):
        raise ModelLoadError(
            f"{model.path} says that it has {count} experts and that each token uses "
            f"{'no' if used is None else used} of them: download it again."
        )


def config_of(model: GGUFModel) -> Any:
    """Returns the configuration of a model.

    Raises ``UnsupportedModel`` for a family that is not read, ``ModelLoadError`` for values that
    are missing or make no sense.
    """
    check_architecture(model)
    model_type = MODEL_TYPES[model.architecture]
    try:
        options = _options(model, model_type)
        return AutoConfig.for_model(model_type, **options)
    except (ModelLoadError, UnsupportedModel):
        raise
    except Exception as error:  # a configuration raises all sorts over values that make no sense
        raise no_such_model(model, error) from error


def no_such_model(model: GGUFModel, error: Exception) -> ModelLoadError:
    """Returns the error for values of which no model can be made."""
    return ModelLoadError(
        f"{model.path} describes no model that there can be ({printable_reason(error)}): "
        "download it again."
    )


def _options(model: GGUFModel, model_type: str) -> dict[str, Any]:
    defaults: dict[str, Any] = CONFIG_MAPPING[model_type]().to_dict()
    table = TABLE_NAMES.get(model_type, model_type)
    options: dict[str, Any] = dict(DEFAULTS.get(table, {}))
    for theirs, ours in TABLES[table].items():
        value = model.number(theirs)
        if ours is not None and value is not None:
            options[ours] = value
        elif value is None and (theirs in NEEDED or theirs.endswith("epsilon")):
            raise ModelLoadError(
                f"{model.path} does not say what its {theirs} is: download it again."
            )
    for theirs, ours in MORE.items():
        value = model.number(theirs)
        if value and ours in defaults:
            options[ours] = value
    _check_factors(model)
    _check_experts(model)
    options |= _heads(model, defaults) | _tokens(model)
    options.pop("rope_theta", None)
    options |= rotary_options(model, defaults)
    options |= FURTHER.get(model.architecture, _nothing)(model, options)
    _check_layers(model)
    return options


def _heads(model: GGUFModel, defaults: dict[str, Any]) -> dict[str, Any]:
    """Sizes of the heads, which a configuration may take from another model otherwise."""
    size, heads = model.head_size, model.number("attention.head_count")
    values = model.number("attention.value_length")
    if values not in (None, size):
        raise UnsupportedModel(
            f"{model.path} has keys of {size} numbers and values of {values}, which is not read: "
            "use the model's Hugging Face folder instead."
        )
    keys = model.number("attention.head_count_kv") or heads
    found = {"num_key_value_heads": keys, "head_dim": size}
    return {name: value for name, value in found.items() if name in defaults}


def _tokens(model: GGUFModel) -> dict[str, Any]:
    """The size of the vocabulary, whether the head shares the embedding's weights, and the ids of
    special tokens."""
    table = model.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise ModelLoadError(
            f"{model.path} lacks the table of its tokens (token_embd.weight): download it again."
        )
    return {
        "vocab_size": table.shape[0],
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "bos_token_id": token_id(model, "bos_token_id"),
        "eos_token_id": token_id(model, "eos_token_id"),
        "pad_token_id": token_id(model, "padding_token_id"),
    }


def _check_layers(model: GGUFModel) -> None:
    """Raises unless the file holds as many layers as it says: a model is built before its weights
    are looked at."""
    numbers = {name.split(".")[1] for name in model.tensors if name.startswith("blk.")}
    said = model.number("block_count")
    if said != len(numbers):
        raise ModelLoadError(
            f"{model.path} says that it has {said} layers, and holds {len(numbers)}: download it "
            "again."
        )


# -- what only some families have ------------------------------------------------------------------


def _nothing(model: GGUFModel, options: dict[str, Any]) -> dict[str, Any]:
    return {}


def _gemma(largest: int) -> Callable[[GGUFModel, dict[str, Any]], dict[str, Any]]:
    """largest: layers of the one size whose attention is scaled by another number."""

    def further(model: GGUFModel, options: dict[str, Any]) -> dict[str, Any]:
        own = options["hidden_size"] // options["num_attention_heads"]
        scaled = own if options["num_hidden_layers"] == largest else options["head_dim"]
        return {"query_pre_attn_scalar": scaled}

    return further


def _gpt2(model: GGUFModel, options: dict[str, Any]) -> dict[str, Any]:
    width = options.pop("feed_forward_length", None)
    return {"n_positions": options["n_ctx"], "n_inner": width}


def _stablelm(model: GGUFModel, options: dict[str, Any]) -> dict[str, Any]:
    return {
        "use_qkv_bias": "blk.0.attn_q.bias" in model.tensors,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in model.tensors,
    }


def _falcon(model: GGUFModel, options: dict[str, Any]) -> dict[str, Any]:
    epsilon = options.pop("rms_norm_eps")
    return {"layer_norm_epsilon": epsilon, "ffn_hidden_size": options.pop("intermediate_size")}


FURTHER: dict[str, Callable[[GGUFModel, dict[str, Any]], dict[str, Any]]] = {
    "falcon": _falcon,
    "gemma2": _gemma(largest=46),
    "gemma3": _gemma(largest=62),
    "gpt2": _gpt2,
    "stablelm": _stablelm,
}
"""What the configurations of some families need besides."""
