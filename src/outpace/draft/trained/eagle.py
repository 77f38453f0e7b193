"""The method "eagle": a trained head of this kind drafts (`heads.eagle`)."""

from __future__ import annotations

from typing import ClassVar

from outpace.draft.trained.attending_head import AttendingHeadDrafter


class EagleDrafter(AttendingHeadDrafter):
    """Drafts with an `Eagle` head."""

    name: ClassVar[str] = "eagle"
