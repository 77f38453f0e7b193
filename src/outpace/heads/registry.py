"""Trained heads, their published formats and classifiers by name, with a line of help on each head.

One module holds all of a head: the network, how it drafts, how it is trained, its published format.
Listing the names imports none of them, nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from outpace.core.lazy import LazyRegistry

if TYPE_CHECKING:
    from outpace.heads.base import Head
    from outpace.heads.checkpoint import Format

_IN = "outpace.methods.heads"
HEADS: Mapping[str, tuple[str, str]] = {
    "medusa": (f"{_IN}.medusa:Medusa", "trained heads, one for each future token"),
    "hydra": (
        f"{_IN}.hydra:Hydra",
        "a trained head that sees the state and the tokens drafted so far",
    ),
    "mlp_speculator": (f"{_IN}.mlp_speculator:MlpSpeculator", "a small trained recurrent network"),
    "eagle": (f"{_IN}.eagle:Eagle", "a trained layer that foresees the model's hidden states"),
    "eagle3": (
        f"{_IN}.eagle3:Eagle3",
        "a trained layer over the text and three of the model's hidden states",
    ),
    "mtp": (
        f"{_IN}.mtp:Mtp",
        "the multi-token-prediction module that a checkpoint brings, or a trained one",
    ),
    "dflash": (
        f"{_IN}.dflash:DFlash",
        "a few trained layers that guess a block of tokens in one pass",
    ),
    "dspark": (
        f"{_IN}.dspark:DSpark",
        "a block of trained layers, each token of which follows the one before it",
    ),
    "s2d": (f"{_IN}.s2d:S2d", "a small trained decoder, with as many of its layers as it takes"),
    "clover": (
        f"{_IN}.clover:Clover",
        "trained heads that attend to the tokens drafted so far",
    ),
    "pass": (f"{_IN}.pass_:Pass", "trained look-ahead embeddings that ride in the target's pass"),
    "hidden_transfer": (
        f"{_IN}.hidden_transfer:HiddenTransfer",
        "trained pseudo states that join half-way up the target's own pass",
    ),
    "ctc": (f"{_IN}.ctc:Ctc", "a trained layer of frames, guessed at once, that spell a text"),
    "lyanna": (
        f"{_IN}.lyanna:Lyanna",
        "a trained head whose states serve again after a mismatch",
    ),
    "diffusion": (
        f"{_IN}.diffusion:Diffusion",
        "a small masked-diffusion model that fills a block of tokens",
    ),
}
"""For each method its network and a line of help. The drafter of a network ``Medusa`` is
``MedusaDrafter`` in the same module."""

DRAFTERS: Mapping[str, str] = {name: f"{place}Drafter" for name, (place, _) in HEADS.items()}

REGISTRY = LazyRegistry(
    "head", "outpace.heads", {name: place for name, (place, _) in HEADS.items()}
)
FORMATS = LazyRegistry(
    "format",
    "outpace.head_formats",
    {
        "outpace": "outpace.heads.checkpoint:OutpaceFormat",
        # Before the others: its folders name architectures like theirs.
        "speculators": f"{_IN}.speculators:SpeculatorsFormat",
        "eagle": f"{_IN}.eagle:EagleFormat",
        "eagle3": f"{_IN}.eagle3_format:Eagle3Format",
        "dflash2": f"{_IN}.dflash2:DFlash2Format",
        # Before DFlash's, some of whose names it has.
        "dspark": f"{_IN}.dspark_format:DSparkFormat",
        "dflash": f"{_IN}.dflash_format:DFlashFormat",
        "mlp_speculator": f"{_IN}.mlp_speculator:MlpSpeculatorFormat",
        "medusa": f"{_IN}.medusa:MedusaFormat",
        "hydra": f"{_IN}.hydra:HydraFormat",
        "gemma4_assistant": f"{_IN}.gemma4_assistant:Gemma4AssistantFormat",
    },
)
CLASSIFIERS = ("judge", "stop_head")
"""What `outpace.heads.classifiers` holds."""


def head_names() -> list[str]:
    """Returns the names of all heads; imports none of them."""
    return REGISTRY.names()


def find_head(name: str) -> type[Head]:
    """Returns the head of this name; ``ConfigError`` with a suggestion if there is none."""
    found: type[Head] = REGISTRY.find(name)
    return found


def format_names() -> list[str]:
    """Returns the names of all formats; imports none of them."""
    return FORMATS.names()


def find_format(name: str) -> type[Format]:
    """Returns the format of this name; ``ConfigError`` with a suggestion if there is none."""
    found: type[Format] = FORMATS.find(name)
    return found


def format_of(about: Mapping[str, Any]) -> type[Format] | None:
    """Returns the format that a configuration is in, if any is known."""
    return next((each for each in FORMATS.all().values() if each.recognises(about)), None)
