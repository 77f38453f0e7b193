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

REGISTRY = LazyRegistry(
    "method",
    GROUP,
    {
        "none": "outpace.methods.none:NoDrafter",
        "ngram": "outpace.methods.lookup.ngram:NgramDrafter",
        "suffix": "outpace.methods.lookup.suffix:SuffixDrafter",
        "recycling": "outpace.methods.lookup.recycling:RecyclingDrafter",
        "retrieval": "outpace.methods.lookup.retrieval:RetrievalDrafter",
        "consensus": "outpace.methods.lookup.consensus:ConsensusDrafter",
        "lookahead": "outpace.methods.self_speculation.lookahead:LookaheadDrafter",
        "draft_model": "outpace.methods.models.draft_model:DraftModel",
        "draft_tree": "outpace.methods.models.tree:DraftTree",
        **TRAINED,
        "dflash2": "outpace.methods.heads.dflash2:DFlash2Drafter",
        "gemma4_assistant": "outpace.methods.heads.gemma4_assistant:Gemma4AssistantDrafter",
        "layer_skip": "outpace.methods.self_speculation.layer_skip:LayerSkip",
        "early_exit": "outpace.methods.self_speculation.early_exit:EarlyExit",
        "auto": "outpace.methods.choosers.auto:AutoDrafter",
        "ensemble": "outpace.methods.choosers.ensemble:Ensemble",
        "hedge": "outpace.methods.choosers.learned.hedge:Hedge",
        "ucb": "outpace.methods.choosers.learned.ucb:Ucb",
        "tagged": "outpace.methods.choosers.tagged:Tagged",
        "task": "outpace.methods.choosers.task:Task",
        "staged": "outpace.methods.choosers.staged:Staged",
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
    return found
