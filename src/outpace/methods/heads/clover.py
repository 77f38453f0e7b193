"""The method "clover": a trained head drafts (`heads.steps.clover`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from outpace.methods.heads.steps import StepHeadDrafter


class CloverDrafter(StepHeadDrafter):
    """Drafts with a `Clover` head."""

    name: ClassVar[str] = "clover"
    specimen_sizes: ClassVar[Mapping[str, Any]] = {"depths": 3, "prefix": True}
