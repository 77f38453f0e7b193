"""What it costs a drafter to catch up with a text."""

from __future__ import annotations

from collections import deque
from statistics import median_low

from outpace.policy.auto.cost import KEPT


class ReadingCost:
    """How long a drafter takes to read a token that it has not seen yet: of a prompt, or of what
    was generated without it."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=KEPT)
        self._earlier = 0.0  # plain rounds for each token, in an earlier run

    def to_save(self, plain: float | None) -> float:
        """Returns what a token takes in plain rounds, for a later run. plain: seconds of such a
        round, None where none was measured."""
        return median_low(self._seen) / plain if self._seen and plain else self._earlier

    def restore(self, rounds: float) -> None:
        """Goes on from what an earlier run saved."""
        self._earlier = rounds

    def add(self, seconds: float, tokens: int) -> None:
        """Adds what reading n tokens took."""
        self._seen.append(max(0.0, seconds) / tokens)

    def seconds(self, tokens: int, plain: float) -> float:
        """Returns what reading n will take; 0 while nothing is known. plain: seconds of a
        plain round."""
        return tokens * (median_low(self._seen) if self._seen else self._earlier * plain)

    def besides(self, seconds: float, tokens: int) -> float:
        """Returns what of a draft's seconds did not go into reading that many; 0 while nothing is
        known."""
        return max(0.0, seconds - tokens * median_low(self._seen)) if self._seen else 0.0
