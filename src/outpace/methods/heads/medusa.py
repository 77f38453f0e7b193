"""The method "medusa": a trained head drafts (`heads.steps.medusa`)."""

from __future__ import annotations

from typing import ClassVar

from outpace.methods.heads.steps import StepHeadDrafter


class MedusaDrafter(StepHeadDrafter):
    """Drafts with a `Medusa` head."""

    name: ClassVar[str] = "medusa"
