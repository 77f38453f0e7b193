"""When a chain ends early: the drafter was not sure of its last token.

Draft & Verify (Zhang et al., ACL 2024), section 3.4. The token itself stays, and the next one is
not drawn. So what decides is known before the next token is drawn, and each token still follows its
law.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

STEP = 0.01
"""How far the threshold is moved at a time (the paper's epsilon)."""

MEMORY = 0.5
"""Weight of the rounds before in the acceptance rate (the paper's beta 1)."""

INERTIA = 0.9
"""Weight of the old threshold in the new one (the paper's beta 2)."""

WANTED = 0.9
"""The acceptance rate that the threshold is moved towards."""

FIRST = 0.6
"""The threshold before anything is known."""


@dataclass
class DraftExit:
    """The threshold of one text.

    >>> adaptive = DraftExit()
    >>> adaptive.learn(drafted=4, accepted=0)
    >>> round(adaptive.threshold, 3)
    0.601
    """

    threshold: float = FIRST
    adaptive: bool = True
    rate: float = WANTED
    """The acceptance rate of late."""

    def learn(self, drafted: int, accepted: int) -> None:
        """Is told what became of a draft."""
        if not self.adaptive or not drafted:
            return
        self.rate = MEMORY * self.rate + (1 - MEMORY) * accepted / drafted
        moved = self.threshold + (STEP if self.rate <= WANTED else -STEP)
        self.threshold = INERTIA * self.threshold + (1 - INERTIA) * moved


def ended(
    exits: Sequence[DraftExit], counts: Sequence[int], length: int, sure: Sequence[float]
) -> list[int]:
    """Returns how many tokens each chain may have once its ``length``-th was drawn.

    counts: how many it might have had before; sure: the probability that the drafter gave its last
    token.
    """
    return [
        min(count, length) if confidence < one.threshold else count
        for one, count, confidence in zip(exits, counts, sure, strict=True)
    ]
