"""How long it goes on that drafting pays."""

from __future__ import annotations

from collections import deque

from outpace.policy.auto.cost import KEPT

HORIZON = 128
"""What a drafter has to read before its first draft must be repaid within n tokens at most,
because texts may end early."""


class Spells:
    """How many tokens a row generates while drafting promises to pay without a break.

    What a drafter has to read first must be repaid within such a spell. Spells are short where
    the batch keeps changing between a size for which drafting pays and one for which it does not.
    """

    def __init__(self) -> None:
        self._seen: deque[int] = deque([HORIZON], maxlen=KEPT)

    def add(self, tokens: int) -> None:
        """Adds a spell."""
        self._seen.append(min(tokens, HORIZON))

    def add_unbroken(self) -> None:
        """Adds a spell that lasted until the text ended, which might have gone on for long."""
        self.add(HORIZON)

    @property
    def typical(self) -> float:
        """The tokens that the next one is expected to last."""
        return sum(self._seen) / len(self._seen)
