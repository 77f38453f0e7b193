"""The speed-up that speculation can give, by formula, from measured times, or from rounds that
were run, without a clock: `outpace bench` and `outpace doctor` measure elsewhere.

The formulas are those of Leviathan, Kalman and Matias 2022. alpha: probability that a drafted token
is accepted, independent of the others. k: drafted tokens per round. Their c, the time of a drafted
token over that of a target pass, supposes that scoring k + 1 tokens takes as long as scoring one;
here both are measured.

A round of a draft of k tokens takes k drafted tokens and one pass over k + 1 columns (tokens), and
brings one token more than are accepted. `payoff` does these sums for rounds that were run and
times of their parts, measured or predicted (`machines`). Costs are in passes over one column."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


def expected_tokens(alpha: float, k: int) -> float:
    """Returns the mean tokens per round, the correction or bonus included.

    >>> expected_tokens(0.5, 2), expected_tokens(1.0, 3)
    (1.75, 4.0)
    """
    return sum(alpha**i for i in range(k + 1))


@dataclass(frozen=True)
class Times:
    """Seconds of one round's parts, measured or predicted, at one batch size and context."""

    draft: Mapping[int, float]
    """By the number of drafted tokens, from 1."""
    verify: Mapping[int, float]
    """By the number of scored tokens, from 1."""

    def drafting(self, k: int) -> float:
        """Seconds to draft k tokens, between the known lengths by straight lines."""
        return 0.0 if k == 0 else interpolated({0: 0.0, **self.draft}, k)

    def verifying(self, n: int) -> float:
        """Seconds to score n tokens, between the known counts by straight lines."""
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
    """Returns the draft length within the known ones with the greatest speed-up, 0 where none is
    above 1.

    >>> best_k_from_times(0.8, Times(draft={1: 0.2, 8: 1.6}, verify={1: 1.0, 9: 1.0}))
    4
    """
    return max(range(times.deepest() + 1), key=lambda k: speedup_from_times(alpha, k, times))


def ceiling(times: Times) -> tuple[int, float]:
    """Returns the draft length and the speed-up of a drafter that is always right."""
    k = best_k_from_times(1.0, times)
    return k, speedup_from_times(1.0, k, times)


def acceptance_of(accepted: Sequence[int], judged: Sequence[int]) -> float:
    """Returns the probability alpha that fits the counts of each position best, if acceptances
    are independent.

    That is accepted tokens / judged tokens (maximum likelihood): a token is judged when all before
    it were accepted.

    >>> acceptance_of([50, 25], [100, 50])
    0.5
    """
    total = sum(judged)
    return sum(accepted) / total if total else 0.0


# -- what drafts bring, from what passes cost --------------------------------------------------


@dataclass(frozen=True)
class PlayedDraft:
    """One round of one text."""

    drafted: int
    accepted: int


@dataclass(frozen=True)
class Payoff:
    """What drafts bring on average for a round, in passes over one column."""

    length: int
    """Tokens of a draft, at most."""
    tokens: float
    """Tokens that the round adds to the text: the accepted ones and one more."""
    drafted: float
    """Drafted tokens."""
    drafting: float
    """What drafting them takes."""
    scoring: float
    """What the target's pass over them takes, and the engine's own work."""

    @property
    def speedup(self) -> float:
        """How many times as fast as plain decoding the text is written."""
        return self.tokens / (self.drafting + self.scoring)

    @property
    def acceptance(self) -> float:
        """The share of drafted tokens that are accepted; 0 where nothing is drafted."""
        return (self.tokens - 1) / self.drafted if self.drafted else 0.0

    @property
    def cost(self) -> float:
        """What a drafted token takes; 0 where nothing is drafted."""
        return self.drafting / self.drafted if self.drafted else 0.0

    @property
    def affordable(self) -> float:
        """What a drafted token may take at most for these drafts to pay at this acceptance. Below 0
        they would not pay if they cost nothing, since scoring them takes too long."""
        return (self.tokens - self.scoring) / self.drafted if self.drafted else 0.0

    @property
    def needed(self) -> float:
        """The share of drafted tokens that has to be accepted for these drafts to pay. Above 1 they
        cannot pay."""
        cost = self.drafting + self.scoring
        return (cost - 1) / self.drafted if self.drafted else float("inf")


def payoff(rounds: Sequence[PlayedDraft], times: Times, plain: float, length: int) -> Payoff:
    """Returns what rounds that were run would have brought with drafts of at most ``length``
    tokens: the later ones of longer drafts left out.

    times: of a draft, and of scoring one with all that a round takes besides. plain: seconds of a
    plain round. Raises ``ValueError`` without a round.
    """
    if not rounds:
        raise ValueError("there is no round to count")
    count = len(rounds)
    drafted = [min(each.drafted, length) for each in rounds]
    return Payoff(
        length,
        tokens=1 + sum(min(each.accepted, length) for each in rounds) / count,
        drafted=sum(drafted) / count,
        drafting=sum(map(times.drafting, drafted)) / count / plain,
        scoring=sum(times.verifying(1 + k) for k in drafted) / count / plain,
    )


def best_payoff(
    rounds: Sequence[PlayedDraft], times: Times, plain: float, lengths: Iterable[int]
) -> Payoff:
    """Returns the payoff of drafts of that length with which the text is written fastest, also
    where none is faster than plain decoding. lengths: from 1 on, at least one."""
    found = [payoff(rounds, times, plain, length) for length in lengths]
    return max(found, key=lambda each: each.speedup)


def acceptance_by_depth(rounds: Sequence[PlayedDraft]) -> list[float]:
    """Returns, by depth, the share of tokens there that were accepted, of those of which all before
    them were.

    >>> acceptance_by_depth([PlayedDraft(2, 2), PlayedDraft(2, 1), PlayedDraft(1, 0)])
    [0.6666666666666666, 0.5]
    """
    found = []
    for depth in range(max((each.drafted for each in rounds), default=0)):
        judged = [r for r in rounds if r.drafted > depth and r.accepted >= depth]
        if not judged:
            break
        found.append(sum(each.accepted > depth for each in judged) / len(judged))
    return found
