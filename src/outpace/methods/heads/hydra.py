"""The method "hydra": a trained head drafts (`heads.steps.hydra`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from outpace.methods.heads.steps import StepHeadDrafter


class HydraDrafter(StepHeadDrafter):
    """Drafts with a `Hydra` head."""

    name: ClassVar[str] = "hydra"
    specimen_sizes: ClassVar[Mapping[str, Any]] = {"depths": 3, "prefix": True}
