"""Models that keep states elsewhere than transformers' cache usually has them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outpace.targets.hf.recurrent.places import InArgument, InAttributes, Places, Shift
from outpace.targets.hf.recurrent.states import Name, StateCache
from outpace.targets.hf.slots.cache import SlotCache

STATES = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding", "recurrent"})
"""What transformers calls layers that have a state."""
LISTS = ("layer_types", "layers_block_type")
"""What configurations call the list of their layers' types. Recurrent Gemma's has the second name,
and no other before transformers 5.23."""

ATTRIBUTES = {
    "RecurrentGemmaRecurrentBlock": (
        ("", "conv1d_state", "conv"),
        ("rg_lru", "recurrent_states", "recurrent"),
    )
}
"""Classes of modules that keep their states in attributes: the part that has each, the attribute,
and the kind of state."""


@dataclass(frozen=True)
class Handed:
    """What a module is handed in the argument ``state``.

    kinds: of the states that are its own, by their place. of_all_layers: each tensor holds the
    states of all layers. shift: the part that shifts its input by a column; the state that is
    called "conv" is the column before the first.
    """

    kinds: Mapping[int, str]
    of_all_layers: bool = False
    shift: str = ""


ARGUMENT = "state"
_SCAN = "recurrent"
HANDED: Mapping[str, Handed] = {
    "RwkvSelfAttention": Handed({1: "conv", 2: _SCAN, 3: _SCAN, 4: _SCAN}, True, "time_shift"),
    "RwkvFeedForward": Handed({0: "conv"}, True, "time_shift"),
    "xLSTMLayer": Handed({0: _SCAN, 1: _SCAN, 2: _SCAN}),
    "mLSTMLayer": Handed({0: _SCAN, 1: _SCAN, 2: _SCAN}),  # where the xlstm package is installed
}
"""Classes of modules that are handed their states."""
WITHOUT_CACHE = frozenset({"rwkv", "xlstm"})
"""Models of such modules: they know no cache of transformers, and nothing in them attends."""
FIRST_LAYER_FIRST = frozenset({"mamba", "mamba2", "falcon_mamba", "rwkv"})
"""Models whose hidden states begin with what the first layer makes of the embedding."""
OF_MAMBA, OF_OTHERS = "cache_params", "past_key_values"
"""What models call their cache."""


def keeps_states(config: Any) -> bool:
    """Returns whether a model of this configuration has layers with a state."""
    text = config.get_text_config()
    types = {kind for name in LISTS for kind in getattr(text, name, None) or ()}
    return text.model_type in WITHOUT_CACHE or bool(STATES & types)


def cache_arguments(model: nn.Module, cache: SlotCache) -> dict[str, Any]:
    """Returns the arguments by which a model is told of its cache for a pass."""
    loaded: Any = model
    if loaded.config.model_type in WITHOUT_CACHE:
        return {"use_cache": False}  # else it would make states that are not needed
    names = inspect.signature(type(model).forward).parameters
    of_mamba = OF_MAMBA in names and OF_OTHERS not in names
    return {OF_MAMBA if of_mamba else OF_OTHERS: cache, "use_cache": True}


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


def places_of(model: nn.Module) -> dict[nn.Module, Places]:
    """Returns the modules that look for their states elsewhere than in the cache, and where."""
    found: dict[nn.Module, Places] = {}
    for module in model.modules():
        kind, number = type(module).__name__, len(found)
        if kind in ATTRIBUTES:
            found[module] = InAttributes(
                [
                    (module.get_submodule(part), key, Name(number, of, 0))
                    for part, key, of in ATTRIBUTES[kind]
                ]
            )
        elif kind in HANDED:
            found[module] = _handed(module, number, HANDED[kind])
    return found


def _handed(module: nn.Module, number: int, how: Handed) -> InArgument:
    loaded: Any = module
    names = {at: Name(number, kind, at) for at, kind in how.kinds.items()}
    layer: int | None = loaded.layer_id if how.of_all_layers else None
    if not how.shift:
        return InArgument(module, ARGUMENT, names, layer)
    before = next(name for name in names.values() if name.kind == "conv")
    shift = Shift(module.get_submodule(how.shift), before)
    return InArgument(module, ARGUMENT, names, layer, shift)
