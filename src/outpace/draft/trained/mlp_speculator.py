"""The method "mlp_speculator": a trained head of this kind drafts (`heads.mlp_speculator`)."""

from __future__ import annotations

from typing import ClassVar

from outpace.draft.trained.step_head import StepHeadDrafter


class MlpSpeculatorDrafter(StepHeadDrafter):
    """Drafts with a `MlpSpeculator` head."""

    name: ClassVar[str] = "mlp_speculator"
