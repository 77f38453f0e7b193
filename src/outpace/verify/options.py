"""Checks of the options that rules are built with."""

from __future__ import annotations

from collections.abc import Iterable

from outpace.core.values import number, shown
from outpace.errors import ConfigError, did_you_mean


def require(rule: str, name: str, value: float, low: float, high: float, *, above: bool) -> None:
    """Raises ``ConfigError`` unless low <= value <= high, or low < value where ``above``."""
    number(f"verify={rule!r}: {name}", value, low, high, closed=not above, error=ConfigError)


def require_one_of(rule: str, name: str, value: str, known: Iterable[str]) -> None:
    """Raises ``ConfigError`` unless the value is a known word."""
    words = list(known)
    if value not in words:
        hint = did_you_mean(str(value), words)
        raise ConfigError(f"verify={rule!r}: unknown {name} {shown(value)}{hint}.")
