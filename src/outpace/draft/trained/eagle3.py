"""The method "eagle3": a trained head of this kind drafts (`heads.eagle3`)."""

from __future__ import annotations

from typing import ClassVar

from outpace.draft.trained.attending_head import AttendingHeadDrafter


class Eagle3Drafter(AttendingHeadDrafter):
    """Drafts with an `Eagle3` head."""

    name: ClassVar[str] = "eagle3"
