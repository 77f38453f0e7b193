"""The method "pass": a trained head drafts (`heads.aux_tokens.pass_`)."""

from __future__ import annotations

from typing import ClassVar

from outpace.methods.heads.riders import AuxHeadDrafter


class PassDrafter(AuxHeadDrafter):
    """Drafts with a `Pass` head."""

    name: ClassVar[str] = "pass"
