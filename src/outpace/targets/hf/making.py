"""Which kind of target a model makes."""

from __future__ import annotations

from typing import Any

from torch import nn

from outpace.targets.hf.fixed import FixedShapes
from outpace.targets.hf.target import HFTarget
from outpace.targets.hf.vision.target import VisionTarget
from outpace.targets.hf.vision.tokens import placeholders


def make_target(
    model: nn.Module,
    rows: int,
    max_length: int,
    fixed: FixedShapes | None = None,
    saved_texts: int = 0,
    saved_tokens: int | None = None,
) -> HFTarget:
    """Returns the target for a model; see `HFTarget` for the arguments."""
    loaded: Any = model
    kind = VisionTarget if placeholders(loaded.config) else HFTarget
    return kind(model, rows, max_length, fixed, saved_texts, saved_tokens)
