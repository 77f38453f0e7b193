"""Local attention in some layers (GPT-Neo): a window that a module cuts out of a table of slots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from outpace.targets.hf.slots.attended import as_attended
from outpace.targets.hf.slots.masks import Layout
from outpace.targets.hf.telling import exchange
from outpace.targets.hf.telling.teller import Teller


def tellers(model: nn.Module) -> Iterator[Teller]:
    """Yields what tells a model's local layers how far away each token is."""
    loaded: Any = model
    window = getattr(loaded.config, "window_size", None)
    for module in model.modules():
        local = getattr(module, "attention_type", None) == "local" and hasattr(module, "bias")
        if local and isinstance(window, int):
            yield LocalWindow(module, window, loaded.config._attn_implementation)


class LocalWindow(Teller):
    """A layer whose window counts slots back from the end of a pass."""

    def __init__(self, module: nn.Module, window: int, attention: str) -> None:
        self._module: Any = module
        self._window = window
        self._attention = attention

    @contextmanager
    def told(self, layout: Layout) -> Iterator[None]:
        slots = layout.seen.shape[-1]
        everything = torch.ones((), dtype=torch.bool, device=layout.seen.device)
        dtype: torch.dtype = self._module.q_proj.weight.dtype
        mask = as_attended(layout.within(self._window), self._attention, dtype)
        with (
            exchange.attribute(self._module, "bias", everything.expand(1, 1, slots, slots)),
            exchange.argument(self._module, "attention_mask", mask),
        ):
            yield
