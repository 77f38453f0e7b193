"""The method "pass": a trained head of this kind drafts (`heads.pass_`)."""

from __future__ import annotations

from typing import ClassVar

from outpace.draft.trained.riding_head import RidingHeadDrafter


class PassDrafter(RidingHeadDrafter):
    """Drafts with a `Pass` head."""

    name: ClassVar[str] = "pass"
