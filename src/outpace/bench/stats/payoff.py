"""What drafts bring, from what passes cost: the arithmetic of ``outpace doctor``, without a clock.

A pass over n columns (tokens) reads each weight once and multiplies by it n times. So it takes as
long as the slower of the two: its bytes at the machine's bandwidth, or n times its multiply-adds on
all cores (the roofline of Williams, Waterman and Patterson 2009). A round of a draft of k tokens
takes k drafted tokens and one pass over k + 1 columns, and brings one token more than are accepted.

`predicted_payoff` says what follows from that for any machine; `payoff` does the same sums for
rounds that were played and parts that were timed. Costs are in passes over one column.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outpace.bench.stats.theory import Times


@dataclass(frozen=True)
class Machine:
    """What a machine can do in a second."""

    bandwidth: float
    """Bytes that all cores together read from memory."""
    multiply_adds: float
    """Multiply-adds of one core."""
    cores: int


@dataclass(frozen=True)
class PassWork:
    """What a pass of one model has to do."""

    nbytes: float
    """Bytes that are read, however many columns the pass has."""
    multiply_adds: float
    """Multiply-adds of one column: one for each weight."""


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


def pass_seconds(work: PassWork, machine: Machine, columns: int) -> float:
    """Returns the seconds of a pass over some columns, by the roofline.

    >>> half = Machine(bandwidth=20e9, multiply_adds=50e9, cores=2)
    >>> [pass_seconds(PassWork(1e9, 2e9), half, n) for n in (1, 2, 4, 8)]
    [0.05, 0.05, 0.08, 0.16]
    """
    reading = work.nbytes / machine.bandwidth
    computing = columns * work.multiply_adds / (machine.multiply_adds * machine.cores)
    return max(reading, computing)


def roofline_times(work: PassWork, machine: Machine, c: float, longest: int) -> Times:
    """Returns the times of drafts of up to ``longest`` tokens and of the passes that score them.

    c: what a drafted token takes, in passes over one column.
    """
    alone = pass_seconds(work, machine, 1)
    return Times(
        draft={k: k * c * alone for k in range(1, longest + 1)},
        verify={n: pass_seconds(work, machine, n) for n in range(1, longest + 2)},
    )


def tokens_of_round(acceptance: Sequence[float], length: int) -> float:
    """Returns the mean tokens of a round that drafts so many, the extra one included.

    acceptance: by depth, the probability that a token is accepted if all before it were.

    >>> tokens_of_round([0.8, 0.5], 2)
    2.2
    """
    reached, tokens = 1.0, 1.0
    for probability in acceptance[:length]:
        reached *= probability
        tokens += reached
    return tokens


def predicted_payoff(
    work: PassWork, machine: Machine, c: float, acceptance: Sequence[float]
) -> Payoff:
    """Returns what drafts of the best length bring: with a length of 0, plain decoding's own pass,
    where no draft pays.

    work: a pass of the target. c: what a drafted token takes, in passes over one column.
    acceptance: by depth, as `tokens_of_round` takes it; drafts are no longer than it is.
    """
    times = roofline_times(work, machine, c, len(acceptance))
    found = [_by_depth(acceptance, times, length) for length in range(len(acceptance) + 1)]
    return max(found, key=lambda each: each.speedup)


def payoff(rounds: Sequence[PlayedDraft], times: Times, plain: float, length: int) -> Payoff:
    """Returns what rounds that were played would have brought with drafts of at most ``length``
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


def _by_depth(acceptance: Sequence[float], times: Times, length: int) -> Payoff:
    plain = times.verifying(1)
    return Payoff(
        length,
        tokens=tokens_of_round(acceptance, length),
        drafted=length,
        drafting=times.drafting(length) / plain,
        scoring=times.verifying(length + 1) / plain,
    )
