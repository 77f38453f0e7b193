"""The configuration that transformers needs, from the values of a GGUF file.

Names are translated by transformers' own tables. What those leave out, a configuration would take
from its defaults, which are those of one checkpoint: it is set here from the file, or as llama.cpp
sets it where a file says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig
from transformers.integrations import ggml

from outpace.core.values import shown
from outpace.errors import ModelLoadError, UnsupportedModel
from outpace.targets.hf.gguf.families import FAMILIES
from outpace.targets.hf.gguf.family import FACTORS
from outpace.targets.hf.gguf.file import GGUFModel, printable_reason
from outpace.targets.hf.gguf.header import StoredTensor
from outpace.targets.hf.gguf.vocabulary import token_id

TABLES: Any = ggml.GGUF_CONFIG_MAPPING
"""transformers' names for llama.cpp's values, by type of model."""
DEFAULTS: Mapping[str, Mapping[str, Any]] = ggml.GGUF_CONFIG_DEFAULTS_MAPPING

USUAL = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
"""What families have that transformers' tables leave out."""

EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
"""What configurations call the number that norms add, which all files have under one name."""

NEEDED = ("context_length", "embedding_length", "block_count", "attention.head_count")
"""Values without which a configuration would be a guess."""

MORE = {
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "attention.sliding_window": ("sliding_window",),
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
}
"""Values that transformers' tables leave out, and what configurations call them."""


def check_architecture(model: GGUFModel) -> None:
    """Raises ``UnsupportedModel`` for a family that is not read, ``ModelLoadError`` for a value
    that is no number."""
    if model.architecture not in FAMILIES:
        raise UnsupportedModel(
            f"{model.path} holds a model of architecture {shown(model.architecture)}, and outpace "
            f"reads GGUF files of {', '.join(FAMILIES)}: use the model's Hugging Face folder "
            "instead, which has a config.json and *.safetensors files."
        )
    if model.family_value("attention.causal") is False:
        raise UnsupportedModel(
            f"{model.path} holds a model that reads texts both ways (attention.causal is false), "
            "as models of embeddings do, and that writes none: use a language model."
        )
    if model.architecture == "falcon" and model.number("attention.head_count_kv") not in (None, 1):
        raise model.unread("holds a Falcon with several key heads, whose GGUF files are not read")


def _check_factors(model: GGUFModel) -> None:
    """Raises ``UnsupportedModel`` for a factor that the layers of this family would leave out."""
    read = FAMILIES[model.architecture].factors
    unread = [name for name in FACTORS if name not in read]
    unread = [name for name in unread if model.number(name) not in (None, 0, 1)]
    # Gemma has factors of its own, which its configuration says.
    known = model.architecture.startswith("gemma") or "attention.scale" in read
    scale = None if known else model.number("attention.scale")
    if scale and not math.isclose(scale, model.head_size**-0.5, rel_tol=1e-4):
        unread.append("attention.scale")
    if unread:
        raise model.unread(
            f"says that its {unread[0]} is {model.number(unread[0]):g}, which is not read for "
            f"models of architecture {model.architecture!r}"
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
    model_type = FAMILIES[model.architecture].type_of(model)
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
    family = FAMILIES[model.architecture]
    whole, model = model, family.settled(model)
    options: dict[str, Any] = dict(DEFAULTS.get(model_type, {}))
    for theirs, ours in _table(
        model_type if family.table is None else family.table, defaults
    ).items():
        value = model.number(theirs)
        if ours is not None and value is not None:
            options[ours] = value
        elif value is None and (theirs in NEEDED or theirs.endswith("epsilon")):
            raise ModelLoadError(
                f"{model.path} does not say what its {theirs} is: download it again."
            )
    _check_layers(model)  # before a list is made of them
    for theirs, names in MORE.items():
        value = model.number(theirs)
        if value:
            options |= {name: value for name in names if name in defaults}
    _check_factors(model)
    _check_experts(model)
    options |= _heads(model, defaults) | _tokens(model)
    options.pop("rope_theta", None)
    options |= rotary_options(model, defaults)
    return options | family.further(whole, options)


def _table(name: str, defaults: dict[str, Any]) -> dict[str, str | None]:
    """What the values of a family are called in its configuration."""
    if name in TABLES:
        known: dict[str, str | None] = TABLES[name]
        return known
    epsilon = next((found for found in EPSILONS if found in defaults), None)
    return {**USUAL, "attention.layer_norm_epsilon": epsilon}


def _heads(model: GGUFModel, defaults: dict[str, Any]) -> dict[str, Any]:
    """Sizes of the heads, which a configuration may take from another model otherwise."""
    if not any("head" in name for name in defaults):
        return {}
    size, heads = model.head_size, model.number("attention.head_count")
    values = model.number("attention.value_length")
    if values not in (None, size):
        raise model.unread(f"has keys of {size} numbers and values of {values}, which is not read")
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
    if model.alone:
        raise UnsupportedModel(
            f"{model.path} holds the multi-token-prediction modules of a model, and not the model: "
            'name the model, and this file as {"method": "mtp", "model": FILE}.'
        )
    if said != len(numbers):
        raise ModelLoadError(
            f"{model.path} says that it has {said} layers, and holds {len(numbers)}: download it "
            "again."
        )


# -- how a model turns its heads by positions ------------------------------------------------------


THETA = 10000.0
"""The usual base of the angles, and that of Gemma 3's windowed layers."""

KINDS = (None, "linear", "yarn")
"""Ways of stretching positions that a file may name. A file that names none means the first."""

YARN = (
    "attn_factor", "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow",
    "yarn_log_multiplier",
)  # fmt: skip
"""Options of YaRN that files rarely hold."""
BETAS = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}


def rotary_options(model: GGUFModel, defaults: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of a configuration that say how positions turn the heads.

    defaults: the configuration's own. Raises ``UnsupportedModel`` for ways that are not read.
    """
    usual = defaults.get("rope_parameters")
    if usual is None:
        return {}
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": float(model.number("rope.freq_base") or THETA),
    }
    size, turned = model.head_size, model.number("rope.dimension_count")
    partly = "partial_rotary_factor" in usual
    if turned not in (None, size) and not (partly and 0 < turned < size):
        raise model.unread(
            f"turns {turned} of the {size} numbers of a head, which is not read for the "
            f"architecture {model.architecture}"
        )
    if partly:
        rope["partial_rotary_factor"] = (turned or size) / size
    rope |= _scaling(model)
    if "sliding_attention" in usual:
        usual_theta = THETA if model.architecture.startswith("gemma") else rope["rope_theta"]
        theta = float(model.number("rope.freq_base_swa") or usual_theta)
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
    if long is not None or short is not None:
        raise ModelLoadError(
            f"{model.path} holds one of the two tables that stretch positions (rope_factors_long "
            "and rope_factors_short) without the other: download it again."
        )
    kind = model.family_value("rope.scaling.type")
    factor = model.number("rope.scaling.factor") or model.number("rope.scale_linear")
    if kind == "none" or (kind in KINDS and factor in (None, 1)):
        return {}
    if kind in (None, "linear"):
        return {"rope_type": "linear", "factor": float(factor)}
    original = model.number("rope.scaling.original_context_length")
    odd, more = _yarn_options(model, factor)
    if kind != "yarn" or original is None or odd:
        unread = f" with {', '.join(odd)}" if odd else ""
        raise model.unread(
            f"stretches its positions in a way that is not read here ({shown(kind)}{unread})"
        )
    return {
        "rope_type": "yarn",
        "factor": float(factor),
        "original_max_position_embeddings": original,
        **more,
    }


def _yarn_options(model: GGUFModel, factor: float) -> tuple[list[str], dict[str, float]]:
    """Returns the names of YaRN's options in a file that are not read, and the others."""
    said = {name: model.number(f"rope.scaling.{name}") for name in YARN}
    more = {ours: said.pop(theirs) for theirs, ours in BETAS.items() if said[theirs] is not None}
    stretch = said["yarn_attn_factor"]
    if stretch is not None and math.isclose(stretch, 0.1 * math.log(factor) + 1, rel_tol=1e-4):
        del said["yarn_attn_factor"]  # what it is anyway
    if model.architecture == "mistral3" and said["yarn_log_multiplier"] is not None:
        more |= {"mscale": 1.0, "mscale_all_dim": said.pop("yarn_log_multiplier")}
    if model.architecture == "deepseek2" and said["yarn_log_multiplier"] is not None:
        stretch = 10 * said.pop("yarn_log_multiplier")  # the converter has divided it
        more |= {"mscale": stretch, "mscale_all_dim": stretch}
    return [name for name, value in said.items() if value is not None], more


def _long_rope(model: GGUFModel, long: StoredTensor, short: StoredTensor) -> dict[str, Any]:
    original = model.number("rope.scaling.original_context_length")
    if original is None:  # as of MiniCPM 4: the long factors count beyond all that it reads
        original = model.number("context_length")
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
    stretch = model.number("rope.scaling.attn_factor")
    return found if stretch is None else {**found, "attention_factor": float(stretch)}
