"""The method "clover": a trained head drafts (`heads.steps.clover`)."""

from __future__ import annotations

from typing import ClassVar

from outpace.draft.trained.steps.base import StepHeadDrafter


class CloverDrafter(StepHeadDrafter):
    """Drafts with a `Clover` head."""

    name: ClassVar[str] = "clover"
