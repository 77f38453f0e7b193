"""What was measured and learned of one way of drafting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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

    def to_save(self) -> dict[str, Any]:
        """Returns what drafting and reading cost in plain rounds, for a later run. How often drafts
        are accepted is learned anew within a text or two."""
        plain = [self.costs.measured(place).get(0) for place in self.costs.places]
        return {
            "costs": self.costs.to_save(),
            "reading": self.reading.to_save(next(filter(None, plain), None)),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Goes on from what an earlier run saved."""
        self.costs.restore(saved["costs"])
        self.reading.restore(float(saved["reading"]))
