"""The method "medusa": a trained head of this kind drafts (`heads.medusa`)."""

from __future__ import annotations

from typing import ClassVar

from outpace.draft.trained.step_head import StepHeadDrafter


class MedusaDrafter(StepHeadDrafter):
    """Drafts with a `Medusa` head."""

    name: ClassVar[str] = "medusa"
