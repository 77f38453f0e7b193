"""The method "clover": a trained head of this kind drafts (`heads.clover`)."""

from __future__ import annotations

from typing import ClassVar

from outpace.draft.trained.step_head import StepHeadDrafter


class CloverDrafter(StepHeadDrafter):
    """Drafts with a `Clover` head."""

    name: ClassVar[str] = "clover"
