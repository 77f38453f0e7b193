"""The method "hidden_transfer": a trained head drafts (`heads.aux_tokens.hidden_transfer`)."""

from __future__ import annotations

from typing import ClassVar

from outpace.methods.heads.riders import AuxHeadDrafter


class HiddenTransferDrafter(AuxHeadDrafter):
    """Drafts with a `HiddenTransfer` head."""

    name: ClassVar[str] = "hidden_transfer"
