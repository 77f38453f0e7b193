"""Formats by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outpace.core.lazy import LazyRegistry
from outpace.heads.formats.base import Format

REGISTRY = LazyRegistry(
    "format",
    "outpace.head_formats",
    {
        "outpace": "outpace.heads.formats.outpace:Outpace",
        "eagle": "outpace.heads.formats.eagle:EagleFormat",
        "eagle3": "outpace.heads.formats.eagle3:Eagle3Format",
        "dflash": "outpace.heads.formats.dflash:DFlashFormat",
        "mlp_speculator": "outpace.heads.formats.mlp_speculator:MlpSpeculatorFormat",
        "speculators": "outpace.heads.formats.speculators:SpeculatorsFormat",
        "medusa": "outpace.heads.formats.medusa:MedusaFormat",
    },
)


def format_names() -> list[str]:
    """Returns the names of all formats."""
    return REGISTRY.names()


def find_format(name: str) -> type[Format]:
    """Returns the format of this name; ``ConfigError`` with a suggestion if there is none."""
    found: type[Format] = REGISTRY.find(name)
    return found


def format_of(about: Mapping[str, Any]) -> type[Format] | None:
    """Returns the format that a configuration is in, if any is known."""
    return next((each for each in REGISTRY.all().values() if each.recognises(about)), None)
