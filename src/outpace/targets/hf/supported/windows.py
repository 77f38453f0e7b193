"""Sliding windows and chunks: whether a model has those that its configuration names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from outpace.targets.hf.supported.plainly import read_plainly, some_tokens

_ANY_LENGTH = 1 << 16
"""Longer than any text that is tried. No more, because some indexers make a place for each token
that they could pick."""
_TOKENS = 3

WINDOW = "sliding_window"
"""Layers see the latest tokens only."""
CHUNK = "attention_chunk_size"
"""Layers see no token of an earlier chunk; chunks begin at fixed positions."""
INDEXED = "index_topk"
"""Layers see n tokens, which an indexer picks."""
NAMES = (WINDOW, CHUNK)
"""What configurations call the spans of tokens that masks show."""


def window_of(model: nn.Module, longest: int) -> int | None:
    """Returns the sliding window that texts of up to ``longest`` tokens meet, None for no window.

    Configurations carry a ``sliding_window`` whether or not the model's code reads it, so the model
    itself is asked.
    """
    return _met(model, WINDOW, longest)


def chunk_of(model: nn.Module, longest: int) -> int | None:
    """Returns the length of the chunks of attention that texts of up to ``longest`` tokens meet."""
    return _met(model, CHUNK, longest)


def _met(model: nn.Module, name: str, longest: int) -> int | None:
    size = named_span(model, name)
    return None if size is None or size >= longest or not follows(model, name) else size


def named_span(model: nn.Module, name: str) -> int | None:
    """Returns the length of a span in the model's configuration, None where it names none."""
    loaded: Any = model
    size: int | None = getattr(loaded.config.get_text_config(), name, None)
    return size


def follows(model: nn.Module, name: str) -> bool:
    """Returns whether another span of that name gives other scores: two passes over three tokens.

    Bits are compared, not numbers within a tolerance. Where a model computes the same thing twice
    with other bits it is taken to have a window, and the probe at load then refuses it.
    """
    ids = some_tokens(model, _TOKENS)
    with with_span(model, name, 1):
        narrow = read_plainly(model, ids)
    with with_span(model, name, _ANY_LENGTH):
        wide = read_plainly(model, ids)
    return not torch.equal(narrow, wide)


@contextmanager
def with_span(model: nn.Module, name: str, size: int) -> Iterator[None]:
    """Gives the model another span for a while, wherever its parts look for it."""
    own = named_span(model, name)
    holders = [holder for holder in _parts(model) if _holds(holder, name, own)]
    try:
        for holder in holders:
            setattr(holder, name, size)
        yield
    finally:
        for holder in holders:
            setattr(holder, name, own)


def _parts(model: nn.Module) -> list[Any]:
    """Returns the modules and their configurations, each once: some keep a copy of their own."""
    modules = list(model.modules())
    configs: list[Any] = [getattr(module, "config", None) for module in modules]
    text = [config.get_text_config() for config in configs if hasattr(config, "get_text_config")]
    return list({id(part): part for part in (*modules, *configs, *text)}.values())


def _holds(part: Any, name: str, size: int | None) -> bool:
    held = getattr(part, name, None)
    return isinstance(held, int) and held == size
