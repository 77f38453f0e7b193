"""Models that keep states elsewhere than transformers' cache usually has them."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from outpace.targets.hf.recurrent.mixers import Attributes
from outpace.targets.hf.recurrent.states import Name, StateCache
from outpace.targets.hf.slots.cache import SlotCache

STATES = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
"""What transformers calls layers whose state lies in its cache."""

ATTRIBUTES = {
    "RecurrentGemmaRecurrentBlock": (
        ("", "conv1d_state", "conv"),
        ("rg_lru", "recurrent_states", "recurrent"),
    )
}
"""Classes of modules that keep their states in attributes: the part that has each, the attribute,
and the kind of state."""


def keeps_states(config: Any) -> bool:
    """Returns whether a model of this configuration has layers with a state."""
    return bool(STATES & set(getattr(config.get_text_config(), "layer_types", None) or ()))


def cache_for(model: nn.Module, rows: int, device: torch.device) -> SlotCache:
    """Returns an empty cache for a model."""
    loaded: Any = model
    if not keeps_states(loaded.config):
        return SlotCache(rows, device)
    wanted: Any = getattr(sys.modules[type(model).__module__], "MiniMaxCache", None)
    if wanted is None:
        return StateCache(rows, device)
    # The model takes no cache that is not of its own class.
    made: StateCache = type("LinearCache", (LinearCache, wanted), {})(rows, device)
    return made


class LinearCache(StateCache):
    """A cache with MiniMax's names for its states."""

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        return self.state(Name(layer_idx, "recurrent", 0))

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.update_recurrent_state(linear_cache, layer_idx)

    def __len__(self) -> int:
        return len(self.layers)


def states_in_attributes(model: nn.Module) -> dict[nn.Module, Attributes]:
    """Returns the modules of a model that keep their states in attributes."""
    found = [module for module in model.modules() if type(module).__name__ in ATTRIBUTES]
    return {
        module: [
            (module.get_submodule(part), key, Name(number, kind, 0))
            for part, key, kind in ATTRIBUTES[type(module).__name__]
        ]
        for number, module in enumerate(found)
    }
