"""How a model turns its heads by positions, from the values of a GGUF file."""

from __future__ import annotations

import math
from typing import Any

from outpace.core.values import shown
from outpace.errors import ModelLoadError, UnsupportedModel
from outpace.targets.hf.gguf.file import GGUFModel
from outpace.targets.hf.gguf.header import Stored

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
        raise UnsupportedModel(
            f"{model.path} turns {turned} of the {size} numbers of a head, which is not read for "
            f"the architecture {model.architecture}: use the model's Hugging Face folder."
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
    kind = model.of_family("rope.scaling.type")
    factor = model.number("rope.scaling.factor") or model.number("rope.scale_linear")
    if kind == "none" or (kind in KINDS and factor in (None, 1)):
        return {}
    if kind in (None, "linear"):
        return {"rope_type": "linear", "factor": float(factor)}
    original = model.number("rope.scaling.original_context_length")
    odd, more = _yarn_options(model, factor)
    if kind != "yarn" or original is None or odd:
        raise UnsupportedModel(
            f"{model.path} stretches its positions in a way that is not read here ({shown(kind)}"
            f"{' with ' + ', '.join(odd) if odd else ''}): use the model's Hugging Face folder."
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
    return [name for name, value in said.items() if value is not None], more


def _long_rope(model: GGUFModel, long: Stored, short: Stored) -> dict[str, Any]:
    original = model.number("rope.scaling.original_context_length")
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
