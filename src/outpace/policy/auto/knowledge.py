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
from outpace.policy.auto.durations import Ends, Spells
from outpace.policy.auto.reading import ReadingCost


@dataclass
class Knowledge:
    """What is known of one drafter, over all requests."""

    acceptance: Acceptance
    costs: CostModel = field(default_factory=CostModel)
    reading: ReadingCost = field(default_factory=ReadingCost)
    spells: Spells = field(default_factory=Spells)
    ends: Ends = field(default_factory=Ends)
    slimness: Slimness = field(default_factory=lambda: Slimness(DRAFTER_MEMORY))
    finding: Finding = field(default_factory=lambda: Finding(REQUEST_MEMORY))

    def ahead(self, remaining: int, so_far: int, alone: bool) -> float:
        """Returns the tokens for which drafting is expected to go on in a text of which so many may
        still be generated. alone: nothing else drafts, so that little is lost by a text that ends
        early."""
        length = remaining if alone else self.ends.expected(remaining, so_far)
        return min(self.spells.typical, length)
