"""The entry ``online`` of a drafter's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from outpace.core.options import option
from outpace.core.values import number, plain_entries, shown, whole
from outpace.errors import ConfigError, did_you_mean

CORRECTED, ALL = "corrected", "all"

ONLINE_HELP = (
    "Whether it learns from the target's corrections between rounds: a dict of learner, "
    "learning_rate, every, window, positions, share. Seeded, sampled texts are then decoded "
    "plainly."
)


@dataclass(frozen=True, kw_only=True)
class OnlineOptions:
    """How a drafter learns between rounds."""

    learner: str = option("osd", "'osd', 'optimistic' or 'ensemble' (train.learners).")
    learning_rate: float = option(1e-4, "How far each of its steps goes.")
    every: int = option(8, "Windows of text between two updates.")
    window: int = option(128, "Tokens of a window; what is learned from sees no more of a text.")
    positions: str = option(
        CORRECTED, "'corrected': learn where a draft was wrong; 'all': at every token."
    )
    share: float = option(
        0.5, "The most of all time that learning may take; 1: as much as it needs."
    )

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("window", 16)):
            whole(f"{name} in 'online'", getattr(self, name), least, error=ConfigError)
        for name in ("learning_rate", "share"):
            value = getattr(self, name)
            number(f"{name} in 'online'", value, 0, 1, closed=False, error=ConfigError)
        if self.positions not in (CORRECTED, ALL):
            raise ConfigError(
                f"positions in 'online' must be {CORRECTED!r} or {ALL!r}, not "
                f"{shown(self.positions)}."
            )
        from outpace.train.learners import find_learner  # torch is not needed before

        find_learner(self.learner)


def online_options(given: Any) -> OnlineOptions | None:
    """Returns how to learn; None where nothing was given. ``ConfigError`` for what is wrong.

    given: ``{}`` or ``{"learner": ..., ...}``, or True for the defaults.
    """
    if given is None or given is False:
        return None
    if given is True:
        return OnlineOptions()
    if isinstance(given, OnlineOptions):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"online must be a dict of options such as {{'learner': 'osd'}}, not {shown(given)}."
        )
    names = [one.name for one in fields(OnlineOptions)]
    for name in given:
        if name not in names:
            raise ConfigError(f"unknown key {name!r} in 'online'{did_you_mean(name, names)}.")
    return OnlineOptions(**plain_entries(given))


def check_learns(online: Any, quantization: Any) -> None:
    """Raises ``ConfigError`` for a wrong ``online``, and for one beside rounded weights."""
    if online_options(online) is not None and quantization not in (None, "auto"):
        raise ConfigError(
            "online and quantization exclude each other: rounded weights cannot learn."
        )
