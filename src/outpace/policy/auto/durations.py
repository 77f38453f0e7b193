"""How long it goes on that drafting pays, and how long texts become."""

from __future__ import annotations

from collections import deque
from math import exp

from outpace.policy.auto.cost import KEPT

HORIZON = 128
"""What a drafter has to read before its first draft must be repaid within so many tokens at most,
because texts may end early."""


KEPT_OF_ENDS = 0.7
"""What is left of the weight of earlier texts at the end of each."""


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


class Ends:
    """When texts end, by the latest ones: what a drafter has to read first must be repaid before
    that. The last few count most, because texts of one kind come together."""

    def __init__(self) -> None:
        self._texts, self._early, self._tokens = 2.0, 1.0, 2.0 * HORIZON

    def add(self, tokens: int, early: bool) -> None:
        """Adds a text that has ended with so many generated tokens. early: it might have gone
        on."""
        self._texts = self._texts * KEPT_OF_ENDS + 1
        self._early = self._early * KEPT_OF_ENDS + early
        self._tokens = self._tokens * KEPT_OF_ENDS + max(1, tokens)

    @property
    def early(self) -> float:
        """The share of those that ended before they had to."""
        return self._early / self._texts

    def expected(self, remaining: int, so_far: int = 0) -> float:
        """Returns how many tokens are expected to come where so many may: as if texts ended by
        themselves with the same chance at each token. so_far: those of a text that has not ended,
        which says something about that chance, too.

        >>> ends = Ends()
        >>> for _ in range(15):
        ...     ends.add(tokens=20, early=True)
        >>> round(ends.expected(1000)), round(ends.expected(1000, so_far=100))
        (20, 50)
        """
        chance = self._early / (self._tokens + so_far)
        return (1 - exp(-chance * remaining)) / chance if chance else float(remaining)
