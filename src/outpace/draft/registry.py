"""Drafters by name, ours and those that other packages register."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outpace.core.lazy import LazyRegistry
from outpace.errors import ConfigError
from outpace.heads.registry import DRAFTERS as TRAINED

if TYPE_CHECKING:
    from outpace.draft.base import Drafter

GROUP = "outpace.drafters"
"""Entry-point group in which other packages name their `Drafter` subclasses."""

BEAMS = ("beam", "beams", "beam_search", "num_beams")
"""Names under which a beam search may be looked for among the drafters."""

EARLIER = ("expect", "admit", "retain", "reset", "rewind")
"""Methods of drafters that nobody calls any more."""

REGISTRY = LazyRegistry(
    "method",
    GROUP,
    {
        "none": "outpace.draft.none:NoDrafter",
        "ngram": "outpace.draft.lookup.ngram:NgramDrafter",
        "suffix": "outpace.draft.lookup.suffix:SuffixDrafter",
        "recycling": "outpace.draft.lookup.recycling:RecyclingDrafter",
        "retrieval": "outpace.draft.lookup.retrieval:RetrievalDrafter",
        "consensus": "outpace.draft.lookup.consensus:ConsensusDrafter",
        "lookahead": "outpace.draft.itself.lookahead:LookaheadDrafter",
        "draft_model": "outpace.draft.models.chain:DraftModel",
        "draft_tree": "outpace.draft.models.tree:DraftTree",
        **TRAINED,
        "layer_skip": "outpace.draft.itself.layer_skip:LayerSkip",
        "early_exit": "outpace.draft.itself.early_exit:EarlyExit",
        "auto": "outpace.draft.route.auto:AutoDrafter",
        "ensemble": "outpace.draft.route.ensemble:Ensemble",
        "hedge": "outpace.draft.route.learned.hedge:Hedge",
        "ucb": "outpace.draft.route.learned.ucb:Ucb",
        "tagged": "outpace.draft.route.tagged:Tagged",
        "task": "outpace.draft.route.task:Task",
        "staged": "outpace.draft.route.staged:Staged",
    },
)


def drafter_names() -> list[str]:
    """Returns the names of all drafters; imports none of them."""
    return REGISTRY.names()


def drafters() -> dict[str, type[Drafter]]:
    """Returns all drafters by name."""
    return REGISTRY.all()


def find_drafter(name: str) -> type[Drafter]:
    """Returns the drafter of this name; ``ConfigError`` with a suggestion if there is none."""
    if name in BEAMS and name not in drafter_names():
        raise ConfigError(
            f"unknown method {name!r}: a beam search drafts nothing, and is asked for by "
            "LLM.beam_search."
        )
    found: type[Drafter] = REGISTRY.find(name)
    old = [method for method in EARLIER if hasattr(found, method)]
    if old:
        raise ConfigError(
            f"method {name!r} ({found.__module__}.{found.__qualname__}) was written for an earlier "
            f"version of outpace ({', '.join(old)}): give it begin(requests), end(requests) and "
            "observe(round), as CONTRIBUTING shows."
        )
    return found
