"""The method "pass": a trained head drafts (`heads.riders.pass_`)."""

from __future__ import annotations

from typing import ClassVar

from outpace.draft.trained.riders.base import RidingHeadDrafter


class PassDrafter(RidingHeadDrafter):
    """Drafts with a `Pass` head."""

    name: ClassVar[str] = "pass"
