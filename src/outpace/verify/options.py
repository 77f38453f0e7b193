"""Checks of the options that rules are built with."""

from __future__ import annotations

import math
from collections.abc import Iterable

from outpace.core.values import shown
from outpace.errors import ConfigError, did_you_mean


def require(rule: str, name: str, value: float, low: float, high: float, *, above: bool) -> None:
    """Raises ``ConfigError`` unless low <= value <= high, or low < value where ``above``."""
    number = not isinstance(value, bool) and isinstance(value, (int, float))
    if number and (low < value if above else low <= value) and value <= high:
        return
    bounds = f"{'(' if above else '['}{low:g}, {high:g}{')' if math.isinf(high) else ']'}"
    raise ConfigError(f"verify={rule!r}: {name} must be a number in {bounds}, not {shown(value)}.")


def require_one_of(rule: str, name: str, value: str, known: Iterable[str]) -> None:
    """Raises ``ConfigError`` unless the value is a known word."""
    words = list(known)
    if value not in words:
        hint = did_you_mean(str(value), words)
        raise ConfigError(f"verify={rule!r}: unknown {name} {shown(value)}{hint}.")
