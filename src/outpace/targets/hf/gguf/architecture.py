"""The configuration that transformers needs, from the values of a GGUF file.

Names are translated by transformers' own tables. What those leave out, a configuration would take
from its defaults, which are those of one checkpoint: it is set here from the file, or as llama.cpp
sets it where a file says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.integrations import ggml

from outpace.errors import ModelLoadError, UnsupportedModel
from outpace.targets.hf.gguf.file import GGUFModel

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

SAME = {
    "attention.layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
    "attention.layer_norm_rms_epsilon": "attention.layer_norm_epsilon",
}
"""Values that files hold under either of two names."""

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

LOCAL_THETA = 10000.0
"""Base of the rotary angles in Gemma 3's windowed layers."""


def check_architecture(model: GGUFModel) -> None:
    """Raises ``UnsupportedModel`` for a family that is not read."""
    if model.architecture not in MODEL_TYPES:
        raise UnsupportedModel(
            f"{model.path} holds a model of architecture {model.architecture[:80]!r}, and outpace "
            f"reads GGUF files of {', '.join(MODEL_TYPES)}: use the model's Hugging Face folder "
            "instead, which has a config.json and *.safetensors files."
        )
    if model.architecture == "llama" and model.of_family("expert_count"):
        raise UnsupportedModel(
            f"{model.path} holds a Mixtral (a llama with experts), whose GGUF files are not read: "
            "use the model's Hugging Face folder instead."
        )
    keys = model.of_family("attention.head_count_kv")
    if model.architecture == "falcon" and keys not in (None, 1):
        raise UnsupportedModel(
            f"{model.path} holds a Falcon with several key heads, whose GGUF files are not read: "
            "use the model's Hugging Face folder instead."
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
    reason = " ".join(str(error).split())[:300]
    return ModelLoadError(
        f"{model.path} describes no model that there can be ({type(error).__name__}: {reason}): "
        "download it again."
    )


def _options(model: GGUFModel, model_type: str) -> dict[str, Any]:
    defaults: dict[str, Any] = CONFIG_MAPPING[model_type]().to_dict()
    table = TABLE_NAMES.get(model_type, model_type)
    options: dict[str, Any] = dict(DEFAULTS.get(table, {}))
    for theirs, ours in TABLES[table].items():
        value = _value(model, theirs)
        if ours is not None and value is not None:
            options[ours] = value
        elif value is None and (theirs in NEEDED or theirs.endswith("epsilon")):
            raise ModelLoadError(
                f"{model.path} does not say what its {theirs} is: download it again."
            )
    for theirs, ours in MORE.items():
        value = _value(model, theirs)
        if value and ours in defaults:
            options[ours] = value
    options |= _heads(model, defaults) | _tokens(model)
    options |= _rotary(model, model_type, defaults, options)
    options |= FURTHER.get(model.architecture, _nothing)(model, options)
    _check_layers(model)
    return options


def _value(model: GGUFModel, name: str) -> Any:
    """Returns one number of the model's family, None if the file has none."""
    value = model.of_family(name)
    if value is None and name in SAME:
        value = model.of_family(SAME[name])
    if isinstance(value, np.ndarray):
        if len(value) == 0 or not (value == value[0]).all():
            raise UnsupportedModel(
                f"{model.path} has another {name} in each layer, which is not read: use the "
                "model's Hugging Face folder instead."
            )
        value = value[0].item()
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return value
    raise ModelLoadError(f"{model.path} says that its {name} is {str(value)[:40]!r}, not a number.")


def _heads(model: GGUFModel, defaults: dict[str, Any]) -> dict[str, Any]:
    """Sizes of the heads, which a configuration may take from another model otherwise."""
    heads = _value(model, "attention.head_count")
    size = _value(model, "attention.key_length") or _value(model, "embedding_length") // heads
    values = _value(model, "attention.value_length")
    if values not in (None, size):
        raise UnsupportedModel(
            f"{model.path} has keys of {size} numbers and values of {values}, which is not read: "
            "use the model's Hugging Face folder instead."
        )
    keys = _value(model, "attention.head_count_kv") or heads
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
    ids = {name: model.values.get(f"tokenizer.{key}") for key, name in TABLES["tokenizer"].items()}
    return {
        "vocab_size": table.shape[0],
        "tie_word_embeddings": "output.weight" not in model.tensors,
        **{name: value for name, value in ids.items() if name != "unk_token_id"},
    }


def _rotary(
    model: GGUFModel, model_type: str, defaults: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """How positions turn the heads."""
    usual = defaults.get("rope_parameters")
    if usual is None:
        return {}
    options.pop("rope_theta", None)
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": float(_value(model, "rope.freq_base") or LOCAL_THETA),
    }
    heads = _value(model, "attention.head_count")
    size = _value(model, "attention.key_length") or _value(model, "embedding_length") // heads
    turned = _value(model, "rope.dimension_count")
    partly = "partial_rotary_factor" in usual
    if turned not in (None, size) and not (partly and 0 < turned < size):
        raise UnsupportedModel(
            f"{model.path} turns {turned} of the {size} numbers of a head, which is not read for "
            f"the architecture {model.architecture}: use the model's Hugging Face folder."
        )
    if partly:
        rope["partial_rotary_factor"] = (turned or size) / size
    rope |= _scaling(model)
    if model_type == "gemma3_text":
        theta = float(_value(model, "rope.freq_base_swa") or LOCAL_THETA)
        local = {"rope_type": "default", "rope_theta": theta}
        return {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}
    original = "original_max_position_embeddings"  # in Phi 3's configuration it stands beside
    beside = {original: rope[original]} if original in rope and original in defaults else {}
    return {"rope_parameters": rope, **beside}


def _scaling(model: GGUFModel) -> dict[str, Any]:
    """How the angles are stretched for texts that are longer than those of the training."""
    long = model.tensors.get("rope_factors_long.weight")
    short = model.tensors.get("rope_factors_short.weight")
    if long is not None and short is not None:
        return _long_rope(model, long, short)
    kind = model.of_family("rope.scaling.type")
    factor = _value(model, "rope.scaling.factor") or _value(model, "rope.scale_linear")
    if kind in (None, "none") and not (kind is None and factor):
        return {}
    if factor is None or factor == 1:
        return {}
    if kind in (None, "linear"):
        return {"rope_type": "linear", "factor": float(factor)}
    original = _value(model, "rope.scaling.original_context_length")
    odd = [name for name in YARN if _value(model, f"rope.scaling.{name}") is not None]
    if kind != "yarn" or original is None or odd:
        raise UnsupportedModel(
            f"{model.path} stretches its positions in a way that is not read here ({kind}"
            f"{' with ' + ', '.join(odd) if odd else ''}): use the model's Hugging Face folder."
        )
    return {
        "rope_type": "yarn",
        "factor": float(factor),
        "original_max_position_embeddings": original,
    }


YARN = (
    "attn_factor", "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow",
    "yarn_log_multiplier",
)  # fmt: skip
"""Options of YaRN that files rarely hold."""


def _long_rope(model: GGUFModel, long: Any, short: Any) -> dict[str, Any]:
    original = _value(model, "rope.scaling.original_context_length")
    if original is None or long.kind != "F32" or short.kind != "F32":
        raise ModelLoadError(
            f"{model.path} holds factors for long texts (rope_factors_long), but not the length "
            "from which on they count: download it again."
        )
    found: dict[str, Any] = {
        "rope_type": "longrope",
        "long_factor": long.raw.numpy().view("<f4").tolist(),
        "short_factor": short.raw.numpy().view("<f4").tolist(),
        "original_max_position_embeddings": original,
    }
    stretch = _value(model, "rope.scaling.attn_factor")
    return found if stretch is None else {**found, "attention_factor": float(stretch)}


def _check_layers(model: GGUFModel) -> None:
    """Raises unless the file holds as many layers as it says: a model is built before its weights
    are looked at."""
    numbers = {name.split(".")[1] for name in model.tensors if name.startswith("blk.")}
    said = _value(model, "block_count")
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
