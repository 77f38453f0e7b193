"""Heads by name."""

from __future__ import annotations

from outpace.core.lazy import LazyRegistry
from outpace.heads.base import StepHead

REGISTRY = LazyRegistry(
    "head",
    "outpace.heads",
    {
        "medusa": "outpace.heads.medusa:Medusa",
        "hydra": "outpace.heads.hydra:Hydra",
        "mlp_speculator": "outpace.heads.mlp_speculator:MlpSpeculator",
    },
)


def head_names() -> list[str]:
    """Returns the names of all heads; imports none of them."""
    return REGISTRY.names()


def find_head(name: str) -> type[StepHead]:
    """Returns the head of this name; ``ConfigError`` with a suggestion if there is none."""
    found: type[StepHead] = REGISTRY.find(name)
    return found
