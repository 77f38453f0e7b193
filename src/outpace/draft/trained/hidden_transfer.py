"""The method "hidden_transfer": a trained head of this kind drafts (`heads.hidden_transfer`)."""

from __future__ import annotations

from typing import ClassVar

from outpace.draft.trained.riding_head import RidingHeadDrafter


class HiddenTransferDrafter(RidingHeadDrafter):
    """Drafts with a `HiddenTransfer` head."""

    name: ClassVar[str] = "hidden_transfer"
