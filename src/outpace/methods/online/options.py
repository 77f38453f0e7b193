"""The options of a drafter with weights, and those of its entry ``online``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from outpace.core.options import Options, Reads, make_options
from outpace.core.values import shown
from outpace.errors import ConfigError

ALL = "all"


def _learner(name: str, value: Any) -> Any:
    from outpace.train.learners import find_learner  # torch is not needed before

    find_learner(value)
    return value


@dataclass(frozen=True, kw_only=True)
class OnlineOptions(Options):
    """How a drafter learns between rounds."""

    learner: Annotated[str, Reads(_learner)] = "osd"
    """'osd', 'optimistic' or 'ensemble' (train.learners)."""
    learning_rate: Annotated[float, Gt(0), Le(1)] = 1e-4
    """How far each of its steps goes."""
    every: Annotated[int, Ge(1)] = 8
    """Windows of text between two updates."""
    window: Annotated[int, Ge(16)] = 128
    """Tokens of a window; what is learned from sees no more of a text."""
    positions: Literal["corrected", "all"] = "corrected"
    """'corrected': learn where a draft was wrong; 'all': at every token."""
    share: Annotated[float, Gt(0), Le(1)] = 0.5
    """The most of all time that learning may take; 1: as much as it needs."""


def online_options(name: str, given: Any) -> OnlineOptions | None:
    """Returns how to learn; None for False. ``ConfigError`` for what is wrong.

    given: ``{}`` or ``{"learner": ..., ...}``, or True for the defaults.
    """
    if given is False:
        return None
    if given is True:
        return OnlineOptions()
    if isinstance(given, OnlineOptions):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{name} must be a dict of options such as {{'learner': 'osd'}}, not {shown(given)}."
        )
    return make_options(OnlineOptions, given, "unknown key {} in 'online'", label="{} in 'online'")


@dataclass(frozen=True, kw_only=True)
class WeightsOptions(Options):
    """What a user may set of a drafter with weights of its own: a model or a trained head."""

    model: Any
    """The model or trained head that drafts."""
    quantization: Literal["auto", "int8", "int4"] | None = "auto"
    """How its weights are rounded; 'auto': to 8 bits where that saves time; null: not."""
    online: Annotated[Any, Reads(online_options)] = None
    """Whether it learns from the target's corrections between rounds: a dict of learner,
    learning_rate, every, window, positions, share. Seeded, sampled texts are then decoded
    plainly."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.online is not None and self.quantization not in (None, "auto"):
            raise ConfigError(
                "online and quantization exclude each other: rounded weights cannot learn."
            )
