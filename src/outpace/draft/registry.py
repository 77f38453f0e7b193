"""Drafters by name, ours and those that other packages register."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outpace.core.lazy import LazyRegistry

if TYPE_CHECKING:
    from outpace.draft.base import Drafter

GROUP = "outpace.drafters"
"""Entry-point group in which other packages name their `Drafter` subclasses."""

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
        "medusa": "outpace.draft.trained.medusa:MedusaDrafter",
        "hydra": "outpace.draft.trained.hydra:HydraDrafter",
        "mlp_speculator": "outpace.draft.trained.mlp_speculator:MlpSpeculatorDrafter",
        "eagle": "outpace.draft.trained.eagle:EagleDrafter",
        "eagle3": "outpace.draft.trained.eagle3:Eagle3Drafter",
        "mtp": "outpace.draft.trained.mtp:MtpDrafter",
        "dflash": "outpace.draft.trained.dflash:DFlashDrafter",
        "s2d": "outpace.draft.trained.s2d:S2dDrafter",
        "clover": "outpace.draft.trained.clover:CloverDrafter",
        "pass": "outpace.draft.trained.pass_:PassDrafter",
        "hidden_transfer": "outpace.draft.trained.hidden_transfer:HiddenTransferDrafter",
        "ctc": "outpace.draft.trained.ctc:CtcDrafter",
        "lyanna": "outpace.draft.trained.lyanna:LyannaDrafter",
        "diffusion": "outpace.draft.trained.diffusion:DiffusionDrafter",
        "layer_skip": "outpace.draft.itself.layer_skip:LayerSkip",
        "early_exit": "outpace.draft.itself.early_exit:EarlyExit",
        "auto": "outpace.draft.route.auto:AutoDrafter",
        "ensemble": "outpace.draft.route.ensemble:Ensemble",
        "hedge": "outpace.draft.route.hedge:Hedge",
        "ucb": "outpace.draft.route.ucb:Ucb",
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
    found: type[Drafter] = REGISTRY.find(name)
    return found
