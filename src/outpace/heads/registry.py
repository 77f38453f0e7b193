"""Heads and classifiers by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outpace.core.lazy import LazyRegistry
from outpace.heads.base import Head

if TYPE_CHECKING:
    from outpace.heads.classifiers.base import Classifier

REGISTRY = LazyRegistry(
    "head",
    "outpace.heads",
    {
        "medusa": "outpace.heads.steps.medusa:Medusa",
        "hydra": "outpace.heads.steps.hydra:Hydra",
        "mlp_speculator": "outpace.heads.steps.mlp_speculator:MlpSpeculator",
        "eagle": "outpace.heads.attending.eagle:Eagle",
        "eagle3": "outpace.heads.attending.eagle3:Eagle3",
        "mtp": "outpace.heads.attending.mtp:Mtp",
        "dflash": "outpace.heads.blocks.dflash:DFlash",
        "s2d": "outpace.heads.attending.s2d:S2d",
        "clover": "outpace.heads.steps.clover:Clover",
        "pass": "outpace.heads.riders.pass_:Pass",
        "hidden_transfer": "outpace.heads.riders.hidden_transfer:HiddenTransfer",
        "ctc": "outpace.heads.steps.ctc:Ctc",
        "lyanna": "outpace.heads.steps.lyanna:Lyanna",
        "diffusion": "outpace.heads.blocks.diffusion:Diffusion",
    },
)

CLASSIFIERS = LazyRegistry(
    "classifier",
    "outpace.classifiers",
    {
        "judge": "outpace.heads.classifiers.judge:Judge",
        "stop_head": "outpace.heads.classifiers.stop_head:StopHead",
    },
)


def head_names() -> list[str]:
    """Returns the names of all heads; imports none of them."""
    return REGISTRY.names()


def find_head(name: str) -> type[Head]:
    """Returns the head of this name; ``ConfigError`` with a suggestion if there is none."""
    found: type[Head] = REGISTRY.find(name)
    return found


def classifier_names() -> list[str]:
    """Returns the names of all classifiers; imports none of them."""
    return CLASSIFIERS.names()


def find_classifier(name: str) -> type[Classifier]:
    """Returns the classifier of this name; ``ConfigError`` with a suggestion if there is none."""
    found: type[Classifier] = CLASSIFIERS.find(name)
    return found
