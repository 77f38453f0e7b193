"""The method "hydra": a trained head drafts (`heads.steps.hydra`)."""

from __future__ import annotations

from typing import ClassVar

from outpace.draft.trained.steps.base import StepHeadDrafter


class HydraDrafter(StepHeadDrafter):
    """Drafts with a `Hydra` head."""

    name: ClassVar[str] = "hydra"
