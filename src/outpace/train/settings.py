"""What is asked of a training run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar, cast

import torch

from outpace.core.values import is_whole, number, shown
from outpace.errors import ConfigError, did_you_mean
from outpace.heads.base import config_of
from outpace.targets.cpu.weights.quantize import QUANTIZATIONS, Quantization
from outpace.train.losses import FORWARD_KL, find_loss

Sizes = TypeVar("Sizes")

AUTO, FLOAT32, BFLOAT16 = "auto", "float32", "bfloat16"
PRECISIONS = (AUTO, FLOAT32, BFLOAT16)
"""`AUTO` is bfloat16 on a GPU that has it, float32 elsewhere: only some CPUs are faster in
bfloat16, and a run may go on upon another one."""
LARGEST_SEED = 1 << 42
"""Seeds of single steps are multiples of it, which have to fit into 64 bits."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """What changes the result of a training run; a run is resumed with the same ones only."""

    method: str
    block: int = 256
    """Tokens of a block of text."""
    batch: int = 4
    """Blocks per step."""
    steps: int = 1000
    learning_rate: float = 1e-3
    warmup: int = 50
    """Steps in which the learning rate rises; it falls to a tenth along a cosine afterwards."""
    clip: float = 1.0
    """Largest norm of a gradient."""
    held_out: float = 0.02
    """The share of the text that nothing is learned from."""
    seed: int = 0
    head: Mapping[str, Any] = field(default_factory=dict)
    """The drafter's sizes."""
    start: str = ""
    """The folder of a drafter to begin as; of a draft model also "pruned" or "random". Unset: a
    head of new weights, or a pruned model."""
    draft: str = ""
    """For a classifier: the draft model's folder or hub name, whose tokens it learns to tell."""
    loss: str = FORWARD_KL
    """For a draft model: how far its distributions are from the target's (`losses`)."""
    precision: str = AUTO
    """The dtype of the products of a step, one of `PRECISIONS`. Weights, sums and checkpoints stay
    in float32."""
    quantization: Quantization | None = None
    """For a head or a draft model: how it learns to be rounded, which it will be while it drafts.
    What is kept are unrounded weights."""

    def __post_init__(self) -> None:
        for name in ("method", "start", "draft", "loss"):
            if not isinstance(value := getattr(self, name), str):
                raise ConfigError(f"{name} must be a name or a path, not {shown(value)}.")
        for name in ("block", "batch", "steps", "warmup"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} must be a whole number from 1 on, not {shown(value)}.")
        for name, top in (("learning_rate", 1.0), ("held_out", 0.5), ("clip", 1e6)):
            number(name, getattr(self, name), 0, top, closed=False, error=ConfigError)
        if not is_whole(self.seed) or abs(self.seed) > LARGEST_SEED:
            raise ConfigError(
                f"seed must be a whole number of at most {LARGEST_SEED}, not {shown(self.seed)}."
            )
        if not isinstance(self.head, Mapping):
            raise ConfigError(f"head must be a dict of sizes, not {shown(self.head)}.")
        find_loss(self.loss)
        if self.quantization not in (None, *QUANTIZATIONS):
            raise ConfigError(
                f"quantization must be {' or '.join(QUANTIZATIONS)}, or None, not "
                f"{shown(self.quantization)}."
            )
        if self.precision not in PRECISIONS:
            raise ConfigError(
                f"precision must be {', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}, not "
                f"{shown(self.precision)}."
            )

    def is_mixed(self, device: torch.device) -> bool:
        """Whether products are made in bfloat16 on this device."""
        if self.precision == AUTO:
            return device.type == "cuda" and torch.cuda.is_bf16_supported()
        return self.precision == BFLOAT16

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def sizes_of(kind: type[Sizes], given: Mapping[str, Any]) -> Sizes:
    """Returns a drafter's sizes; ``ConfigError`` for a name or a value that it does not take."""
    defaults = {one.name: one.default for one in fields(kind)}  # type: ignore[arg-type]
    for name, value in given.items():
        if name not in defaults:
            raise ConfigError(f"this drafter has no size {name!r}{did_you_mean(name, defaults)}.")
        # Where the default is 0, it stands for what the target has; no blocks are a linear map.
        counts = type(value) is int and type(defaults[name]) is int
        if counts and value == 0 and defaults[name] != 0 and name != "blocks":
            raise ConfigError(f"{name} must be at least 1, not 0.")
    try:
        return cast(Sizes, config_of(cast(Any, kind), given))
    except ValueError as error:
        raise ConfigError(f"{error}, which this drafter does not take.") from error
