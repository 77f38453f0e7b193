"""What is an encoder-decoder, and how long its texts may be."""

from __future__ import annotations

from typing import Any

from torch import nn


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
