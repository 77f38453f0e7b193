"""Why a drafter drafts or does not."""

from __future__ import annotations

from dataclasses import dataclass

from outpace.core.account import Reason


@dataclass(frozen=True)
class Decision:
    """The fields are `DrafterAccount`'s."""

    reason: Reason | None = None
    cost: float | None = None
    reading: float | None = None
