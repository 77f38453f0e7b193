"""The settings of a training run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le

from outpace.core.options import Options, Reads
from outpace.core.values import shown
from outpace.errors import ConfigError, did_you_mean
from outpace.heads.base import Sizes, parse_config
from outpace.targets.cpu.weights.quantize import Quantization
from outpace.train.losses import FORWARD_KL, find_loss

LARGEST_SEED = 1 << 42
"""Seeds of single steps are multiples of it, which have to fit into 64 bits."""


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be a name or a path, not {shown(value)}.")
    return value


def _loss(name: str, value: Any) -> str:
    find_loss(_text(name, value))
    return str(value)


def _sizes(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a dict of sizes, not {shown(value)}.")
    return value


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Options):
    """What changes the result of a training run; a run is resumed with the same ones only."""

    method: Annotated[str, Reads(_text)]
    block: Annotated[int, Ge(1)] = 256
    """Tokens of a block of text."""
    batch: Annotated[int, Ge(1)] = 4
    """Blocks per step."""
    steps: Annotated[int, Ge(1)] = 1000
    learning_rate: Annotated[float, Gt(0), Le(1)] = 1e-3
    warmup: Annotated[int, Ge(1)] = 50
    """Steps in which the learning rate rises; it falls to a tenth along a cosine afterwards."""
    clip: Annotated[float, Gt(0), Le(1e6)] = 1.0
    """Largest norm of a gradient."""
    held_out: Annotated[float, Gt(0), Le(0.5)] = 0.02
    """The share of the text that nothing is learned from."""
    seed: Annotated[int, Ge(-LARGEST_SEED), Le(LARGEST_SEED)] = 0
    head: Annotated[Mapping[str, Any], Reads(_sizes)] = field(default_factory=dict)
    """The drafter's sizes."""
    start: Annotated[str, Reads(_text)] = ""
    """The folder of a drafter to begin as; of a draft model also "pruned" or "random". Unset: a
    head of new weights, or a pruned model."""
    draft: Annotated[str, Reads(_text)] = ""
    """For a classifier: the draft model's folder or hub name, whose tokens it learns to judge."""
    loss: Annotated[str, Reads(_loss)] = FORWARD_KL
    """For a draft model: how far its distributions are from the target's (`losses`)."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """The dtype of the products of a step. auto: bfloat16 on a GPU that has it, float32 elsewhere:
    only some CPUs are faster in bfloat16, and a run may go on upon another one. Weights, sums and
    checkpoints stay in float32."""
    quantization: Quantization | None = None
    """For a head or a draft model: how it learns to be rounded, which it will be while it drafts.
    What is kept are unrounded weights."""

    def is_mixed(self, device: torch.device) -> bool:
        """Whether products are made in bfloat16 on this device."""
        if self.precision == "auto":
            return device.type == "cuda" and torch.cuda.is_bf16_supported()
        return self.precision == "bfloat16"


def sizes_of(kind: type[Sizes], given: Mapping[str, Any]) -> Sizes:
    """Returns a drafter's sizes; ``ConfigError`` for a name or a value that it does not take."""
    defaults = asdict(kind())
    for name, value in given.items():
        if name not in defaults:
            raise ConfigError(f"this drafter has no size {name!r}{did_you_mean(name, defaults)}.")
        # Where the default is 0, it stands for what the target has; no blocks are a linear map.
        counts = type(value) is int and type(defaults[name]) is int
        if counts and value == 0 and defaults[name] != 0 and name != "blocks":
            raise ConfigError(f"{name} must be at least 1, not 0.")
    try:
        return parse_config(kind, given)
    except ValueError as error:
        raise ConfigError(f"{error}, which this drafter does not take.") from error
