"""The speed-up that speculation can give, by formula or from measured times.

The formulas are those of Leviathan, Kalman and Matias 2022. alpha: probability that a drafted token
is accepted, independent of the others. k: drafted tokens per round. Their c, the time of a drafted
token over that of a target pass, supposes that scoring k + 1 tokens takes as long as scoring one;
here both are measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


def expected_tokens(alpha: float, k: int) -> float:
    """Returns the mean tokens per round, the correction or bonus included.

    >>> expected_tokens(0.5, 2), expected_tokens(1.0, 3)
    (1.75, 4.0)
    """
    return sum(alpha**i for i in range(k + 1))


@dataclass(frozen=True)
class Times:
    """Measured seconds of one round's parts at one batch size and context."""

    draft: Mapping[int, float]
    """By the number of drafted tokens, from 1."""
    verify: Mapping[int, float]
    """By the number of scored tokens, from 1."""

    def drafting(self, k: int) -> float:
        """Seconds to draft k tokens, between the measured lengths by straight lines."""
        return 0.0 if k == 0 else interpolated({0: 0.0, **self.draft}, k)

    def verifying(self, n: int) -> float:
        """Seconds to score n tokens, between the measured counts by straight lines."""
        return interpolated(self.verify, n)

    def round(self, k: int) -> float:
        """Seconds of a round that drafts k tokens, without the engine's own work."""
        return self.drafting(k) + self.verifying(k + 1)

    def deepest(self) -> int:
        """The longest draft that these times cover."""
        return max(0, min(max(self.draft, default=0), max(self.verify) - 1))


def interpolated(points: Mapping[int, float], at: int) -> float:
    """Returns the value of a piecewise linear curve, continued straight beyond its ends.

    >>> interpolated({1: 1.0, 3: 2.0}, 2), interpolated({1: 1.0, 3: 2.0}, 5)
    (1.5, 3.0)
    """
    if at in points:
        return points[at]
    known = sorted(points)
    if len(known) == 1:
        return points[known[0]]
    right = next((i for i, x in enumerate(known) if x > at), len(known) - 1)
    low, high = known[max(0, right - 1)], known[max(1, right)]
    slope = (points[high] - points[low]) / (high - low)
    return points[low] + slope * (at - low)


def speedup_from_times(alpha: float, k: int, times: Times) -> float:
    """Returns the speed-up over plain decoding that these times allow with draft length k."""
    return expected_tokens(alpha, k) * times.verifying(1) / times.round(k)


def best_k_from_times(alpha: float, times: Times) -> int:
    """Returns the draft length within the measured ones with the greatest speed-up, 0 where none is
    above 1.

    >>> best_k_from_times(0.8, Times(draft={1: 0.2, 8: 1.6}, verify={1: 1.0, 9: 1.0}))
    4
    """
    return max(range(times.deepest() + 1), key=lambda k: speedup_from_times(alpha, k, times))


def ceiling(times: Times) -> tuple[int, float]:
    """Returns the draft length and the speed-up of a drafter that is always right."""
    k = best_k_from_times(1.0, times)
    return k, speedup_from_times(1.0, k, times)


def acceptance_of(accepted: Sequence[int], drafted: Sequence[int]) -> float:
    """Returns the probability alpha that fits the counts of each position best, if acceptances
    are independent.

    That is accepted tokens / judged tokens (maximum likelihood): a token is judged when all before
    it were accepted. Where drafts differ in length, the counts give only an upper bound of the
    judged tokens, and the result is a lower bound.

    >>> acceptance_of([50, 25], [100, 100])
    0.5
    """
    # Behind the first position a token is judged if it was drafted and the one before accepted.
    before = [*drafted[:1], *accepted]
    total = sum(min(pair) for pair in zip(drafted, before, strict=False))
    return sum(accepted) / total if total else 0.0
