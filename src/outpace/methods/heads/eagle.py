"""The method "eagle": a trained head drafts (`heads.attending.eagle`)."""

from __future__ import annotations

from typing import ClassVar

from outpace.methods.heads.attending import AttendingHeadDrafter


class EagleDrafter(AttendingHeadDrafter):
    """Drafts with an `Eagle` head."""

    name: ClassVar[str] = "eagle"
