"""The method "eagle3": a trained head drafts (`heads.attending.eagle3`)."""

from __future__ import annotations

from typing import ClassVar

from outpace.methods.heads.attending import AttendingHeadDrafter


class Eagle3Drafter(AttendingHeadDrafter):
    """Drafts with an `Eagle3` head."""

    name: ClassVar[str] = "eagle3"
