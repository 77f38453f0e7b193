"""The kind of a model, by its class and configuration, and the transformers version it needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

# -- encoder-decoders ------------------------------------------------------------------------------


def reads_sources(config: Any) -> bool:
    """Whether a configuration is one of a model with an encoder and a decoder, and not of a decoder
    that was taken out of such a model and keeps its type."""
    classes = getattr(config, "architectures", None) or ()
    alone = any(name.endswith("ForCausalLM") for name in classes)
    return bool(getattr(config, "is_encoder_decoder", False)) and not alone


def is_encoder_decoder(model: nn.Module) -> bool:
    """Whether a model reads a source with an encoder and writes with a decoder."""
    loaded: Any = model
    alone = type(model).__name__.endswith("ForCausalLM")
    return bool(getattr(loaded.config, "is_encoder_decoder", False)) and not alone


def longest_text(model: nn.Module) -> int | None:
    """Returns the tokens that the decoder has positions for; None for any number."""
    loaded: Any = model
    return _positions(loaded.get_decoder()) or _named(loaded, "max_target_positions")


def longest_source(model: nn.Module) -> int | None:
    """Returns the tokens that the encoder has positions for; None for any number."""
    loaded: Any = model
    return _positions(loaded.get_encoder())


def _positions(side: nn.Module) -> int | None:
    """The rows of a table of positions that a side of the model looks them up in."""
    table: Any = getattr(side, "embed_positions", None)
    if isinstance(table, nn.Embedding):
        return table.num_embeddings - int(getattr(table, "offset", 0))
    if hasattr(table, "weights"):  # of sines: the rows before the first are padding's
        return int(table.weights.shape[0]) - int(table.padding_idx or 0) - 1
    return _named(side, "max_position_embeddings")


def _named(holder: Any, name: str) -> int | None:
    found = getattr(holder.config, name, None)
    return None if found is None else int(found)


# -- images ----------------------------------------------------------------------------------------


_NAMES = (
    "image_token_id",
    "image_token_index",
    "video_token_id",
    "video_token_index",
    "audio_token_id",
    "audio_token_index",
)


def placeholders(config: Any) -> frozenset[int]:
    """Returns the token ids in whose place a model puts what it has seen; none for a model that
    reads text only."""
    if getattr(config, "vision_config", None) is None:
        return frozenset()
    found = (getattr(config, name, None) for name in _NAMES)
    return frozenset(token for token in found if isinstance(token, int))


def sees_images(config: Any) -> bool:
    """Returns whether a saved model is a vision-language model, and not the language model of one,
    by the class that it was saved from."""
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING or not placeholders(config):
        return False
    kind: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    saved = getattr(config, "architectures", None) or [kind.__name__]
    return kind.__name__ in saved


# -- angles by positions ---------------------------------------------------------------------------


def rope_entries(config: Any) -> list[Mapping[str, Any]]:
    """Returns what a text model's configuration says of how positions turn heads: once for all
    layers, or once for each type of them."""
    said = getattr(config, "rope_parameters", None)
    entries = [said, *said.values()] if isinstance(said, Mapping) else []
    return [entry for entry in entries if isinstance(entry, Mapping)]


# -- mixtures of experts ---------------------------------------------------------------------------


GROUPED = "grouped_mm"
"""transformers' usual way to compute experts, in one product of torch that takes no float64."""


def has_experts(entries: Mapping[str, Any]) -> bool:
    """Returns whether a configuration, or a part of it, counts experts: each family has its own
    name for their number, which ends with this word.

    >>> has_experts({"text_config": {"num_local_experts": 8}})
    True
    """
    for name, value in entries.items():
        if isinstance(value, Mapping) and has_experts(value):
            return True
        if str(name).endswith("experts") and type(value) is int and value > 1:
            return True
    return False


def lack_float64(model: nn.Module) -> bool:
    """Returns whether a model's weights are in float64, and what computes its experts does not take
    them."""
    loaded: Any = model
    implementation = getattr(loaded.config.get_text_config(), "_experts_implementation", None)
    wide: bool = loaded.dtype == torch.float64
    return wide and implementation == GROUPED and has_experts(loaded.config.to_dict())


def compute_in_float64(model: nn.Module) -> None:
    """Makes a model with weights in float64 compute its experts one by one, as any dtype can be."""
    if lack_float64(model):
        loaded: Any = model
        loaded.set_experts_implementation("eager")


# -- versions of transformers ----------------------------------------------------------------------


INSTALLED: str = transformers.__version__

WRONG_BEFORE = {"doge": "5.18", "git": "5.18", "umt5": "5.18"}
"""Types of models whose code went wrong over drafted tokens, and the transformers that put it
right."""


def older_than(version: str) -> bool:
    """Whether the installed transformers is older than a version."""
    return Version(INSTALLED) < Version(version)


def too_old_for(model_type: str) -> str | None:
    """Returns the transformers that a type of models needs, None if the installed one will do."""
    needed = WRONG_BEFORE.get(model_type)
    return needed if needed is not None and older_than(needed) else None


def scale_of_embeddings(table: Any) -> float:
    """Returns by what an embedding multiplies its rows when they are looked up, as Gemma's does."""
    names = ("scalar_embed_scale", "embed_scale", "scale")  # the last one of tables in blocks
    return float(next((getattr(table, name) for name in names if hasattr(table, name)), 1.0))
