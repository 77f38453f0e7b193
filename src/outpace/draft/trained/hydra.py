"""The method "hydra": a trained head of this kind drafts (`heads.hydra`)."""

from __future__ import annotations

from typing import ClassVar

from outpace.draft.trained.step_head import StepHeadDrafter


class HydraDrafter(StepHeadDrafter):
    """Drafts with a `Hydra` head."""

    name: ClassVar[str] = "hydra"
