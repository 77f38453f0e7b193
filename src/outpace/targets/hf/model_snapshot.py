"""A snapshot of what a model's masks, cache and compiled passes depend on, compared later."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from outpace.errors import ConfigError
from outpace.targets.hf.masks import NAMES
from outpace.targets.hf.recurrent.families import has_recurrent_states


def autocast_of(device: torch.device) -> torch.dtype | None:
    """Returns the dtype in which ``torch.autocast`` lets models on a device compute here, None
    outside of such a block."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


@dataclass(frozen=True)
class ModelSnapshot:
    """How a model attends and computes at one time. Its owner can change that."""

    attn_implementation: str
    sliding_window: int | None
    attention_chunk_size: int | None
    dtype: torch.dtype
    device: torch.device
    training: bool
    """Whether its layers drop some of what they compute at random, as they do in training."""
    autocast: torch.dtype | None
    """What ``torch.autocast`` makes it compute in; None outside of such a block."""
    vocab_size: int | None
    """Tokens that it can write."""
    modules: tuple[int, ...]
    """Which ones it consists of, by their ``id``; none for a model without a recurrent state, of
    whose modules nothing is remembered from pass to pass."""

    @classmethod
    def of(cls, model: nn.Module) -> ModelSnapshot:
        """Returns the snapshot of a model as it is now."""
        loaded: Any = model
        config = loaded.config.get_text_config()
        spans = {name: getattr(config, name, None) for name in NAMES}
        implementation: str = config._attn_implementation
        return cls(
            implementation,
            dtype=loaded.dtype,
            device=loaded.device,
            training=loaded.training,
            autocast=autocast_of(loaded.device),
            vocab_size=getattr(config, "vocab_size", None),
            modules=tuple(map(id, loaded.modules())) if has_recurrent_states(loaded.config) else (),
            **spans,
        )

    def check(self, model: nn.Module) -> None:
        """Raises ``ConfigError`` if the model has changed since.

        Boolean masks would be added to the scores of an attention that wants numbers, old windows
        would be used, and dropout would change scores at random: another text, and no error. What
        autocast has let the cache hold cannot be read in another dtype, new tokens would never be
        written, and modules that were exchanged would read no states.
        """
        now = ModelSnapshot.of(model)
        if now.modules != self.modules:
            raise ConfigError(
                "modules of the model were exchanged after outpace took it over, by an adapter "
                "maybe, and its recurrent states are kept by module: undo that, or make a new LLM "
                "of the model as it is."
            )
        for name in (field.name for field in dataclasses.fields(self)):
            before, after = getattr(self, name), getattr(now, name)
            if before != after:
                raise ConfigError(
                    f"the model's {name} was {before!r} when outpace took it over and is {after!r} "
                    "now: set it back, or make a new LLM of the model as it is."
                )


SWITCHES = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")
"""What says, in peft's modules, which adapters compute, and how strongly."""


def recorded_parts(model: nn.Module) -> Hashable:
    """Returns what passes that were recorded on a GPU depend on, and would not notice to change:
    a model's modules, where its tensors lie, which adapters are on; None elsewhere.

    A tensor that is changed in place, as an optimizer does, lies where it lay.
    """
    owned: Any = model
    return _parts(model) if owned.device.type == "cuda" else None


def _parts(model: nn.Module) -> Hashable:
    tensors = (*model.parameters(), *model.buffers())
    return (
        tuple(map(id, model.modules())),
        tuple(tensor.data_ptr() for tensor in tensors),
        tuple(
            str(getattr(module, name, None))
            for module in model.modules()
            if hasattr(type(module), SWITCHES[0])
            for name in SWITCHES
        ),
    )
