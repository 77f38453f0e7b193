"""How long the texts of an encoder-decoder may be."""

from __future__ import annotations

from typing import Any

from torch import nn


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
