"""The method "mlp_speculator": a trained head drafts (`heads.steps.mlp_speculator`)."""

from __future__ import annotations

from typing import ClassVar

from outpace.methods.heads.steps import StepHeadDrafter


class MlpSpeculatorDrafter(StepHeadDrafter):
    """Drafts with a `MlpSpeculator` head."""

    name: ClassVar[str] = "mlp_speculator"
