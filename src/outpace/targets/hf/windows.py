"""Sliding windows: whether a model has the one that its configuration names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from outpace.targets.hf.plainly import read_plainly, some_tokens

_ANY_LENGTH = 1 << 30
_TOKENS = 3


def window_of(model: nn.Module, longest: int) -> int | None:
    """Returns the sliding window that texts of up to ``longest`` tokens meet, None for no window.

    Configurations carry a ``sliding_window`` whether or not the model's code reads it, so the model
    itself is asked.
    """
    loaded: Any = model
    window: int | None = getattr(loaded.config.get_text_config(), "sliding_window", None)
    if window is None or window >= longest or not follows_window(model):
        return None
    return window


def follows_window(model: nn.Module) -> bool:
    """Returns whether another ``sliding_window`` gives other scores: two passes over three tokens.

    Bits are compared, not numbers within a tolerance. Where a model computes the same thing twice
    with other bits it is taken to have a window, and the probe at load then refuses it.
    """
    ids = some_tokens(model, _TOKENS)
    with with_window(model, 1):
        narrow = read_plainly(model, ids)
    with with_window(model, _ANY_LENGTH):
        wide = read_plainly(model, ids)
    return not torch.equal(narrow, wide)


@contextmanager
def with_window(model: nn.Module, window: int) -> Iterator[None]:
    """Gives the model another sliding window for a while, wherever its parts look for it."""
    loaded: Any = model
    own = loaded.config.get_text_config().sliding_window
    holders = [holder for holder in _parts(loaded) if _names_window(holder, own)]
    try:
        for holder in holders:
            holder.sliding_window = window
        yield
    finally:
        for holder in holders:
            holder.sliding_window = own


def _parts(model: nn.Module) -> list[Any]:
    """Returns the modules and their configurations, each once: some keep a copy of their own."""
    modules = list(model.modules())
    configs: list[Any] = [getattr(module, "config", None) for module in modules]
    text = [config.get_text_config() for config in configs if hasattr(config, "get_text_config")]
    return list({id(part): part for part in (*modules, *configs, *text)}.values())


def _names_window(part: Any, window: int) -> bool:
    named = getattr(part, "sliding_window", None)
    return isinstance(named, int) and named == window
