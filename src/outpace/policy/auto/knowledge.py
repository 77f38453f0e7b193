"""What was measured and learned of one way of drafting."""

from __future__ import annotations

from dataclasses import dataclass, field

from outpace.policy.auto.acceptance import (
    DRAFTER_MEMORY,
    REQUEST_MEMORY,
    Acceptance,
    Finding,
    Slimness,
)
from outpace.policy.auto.cost import CostModel
from outpace.policy.auto.reading import ReadingCost
from outpace.policy.auto.spells import Spells


@dataclass
class Knowledge:
    """What is known of one drafter, over all requests."""

    acceptance: Acceptance
    costs: CostModel = field(default_factory=CostModel)
    reading: ReadingCost = field(default_factory=ReadingCost)
    spells: Spells = field(default_factory=Spells)
    slimness: Slimness = field(default_factory=lambda: Slimness(DRAFTER_MEMORY))
    finding: Finding = field(default_factory=lambda: Finding(REQUEST_MEMORY))
