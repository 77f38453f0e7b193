"""Length policies by name, ours and those that other packages register."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from outpace.core.lazy import LazyRegistry
from outpace.core.options import make_options

if TYPE_CHECKING:
    from outpace.policy.lengths.base import LengthPolicy

GROUP = "outpace.lengths"
"""Entry-point group in which other packages name their `LengthPolicy` subclasses."""

REGISTRY = LazyRegistry(
    "length",
    GROUP,
    {
        "constant": "outpace.policy.lengths.adaptive:Constant",
        "heuristic": "outpace.policy.lengths.adaptive:Heuristic",
        "heuristic_transient": "outpace.policy.lengths.adaptive:TransientHeuristic",
        "confidence": "outpace.policy.lengths.stopping:Confidence",
        "entropy": "outpace.policy.lengths.stopping:Entropy",
        "draft_exit": "outpace.policy.lengths.stopping:DraftExit",
        "risk": "outpace.policy.lengths.stopping:Risk",
        "stop_head": "outpace.policy.lengths.stopping:StopHead",
        "batch": "outpace.policy.lengths.adaptive:Bass",
    },
)


def length_names() -> list[str]:
    """Returns the names of all length policies; imports none of them."""
    return REGISTRY.names()


def find_length(name: str) -> type[LengthPolicy]:
    """Returns the policy of this name; ``ConfigError`` with a suggestion if there is none."""
    found: type[LengthPolicy] = REGISTRY.find(name)
    return found


def length_options(name: str, given: Mapping[str, Any]) -> Any:
    """Returns the policy's options; ``ConfigError`` for an unknown policy, option or bad value.

    numpy's numbers are taken like Python's.
    """
    place = f"length={name!r}"
    unknown, needs = f"{place} has no option {{}}", f"{place} needs {{}}"
    return make_options(find_length(name).Options, given, unknown, needs, f"{place}: {{}}")
