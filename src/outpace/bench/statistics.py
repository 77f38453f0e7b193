"""Statistics of a benchmark: confidence intervals of ratios, sums of counters over texts, and
whether texts are the same. No interval assumes a distribution of the noise."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from outpace.bench.theory import Times
from outpace.core.stats import Metrics
from outpace.errors import UnsupportedModel
from outpace.targets.base import Target

LEVEL = 0.95
RESAMPLES = 5000


UNSURE = 1.1
"""A single ratio that is nearer to 1 than this is taken for noise: how far ratios of one kind
differ is not known of it."""


@dataclass(frozen=True)
class Interval:
    """A geometric mean of ratios and its interval. ``low`` and ``high`` are None for a single
    value."""

    mean: float
    low: float | None
    high: float | None
    count: int

    def __contains__(self, value: float) -> bool:
        return self.low is not None and self.high is not None and self.low <= value <= self.high

    @property
    def differs(self) -> bool:
        """Whether the ratio is distinguishable from 1."""
        if self.low is None or self.high is None:
            return not 1 / UNSURE <= self.mean <= UNSURE
        return 1.0 not in self

    @property
    def ratio(self) -> str:
        """The ratio in words; "none" where it is not distinguishable from 1.

        >>> Interval(1.5, 1.4, 1.6, 9).ratio, Interval(0.98, 0.9, 1.1, 9).ratio
        ('1.50', 'none')
        """
        return f"{self.mean:.2f}" if self.differs else "none"

    @property
    def bounds(self) -> str:
        """The interval; "" of a single value."""
        if self.low is None or self.high is None:
            return ""
        return f"[{self.low:.2f}, {self.high:.2f}]"

    @property
    def phrase(self) -> str:
        """The ratio in words, and its interval."""
        return f"{self.ratio} {self.bounds}".rstrip()

    def __str__(self) -> str:
        return f"{self.mean:.2f} {self.bounds}".rstrip()


def geometric_mean(ratios: Sequence[float]) -> float:
    """Returns the n-th root of the product: of a ratio and its inverse, 1.

    >>> geometric_mean([2.0, 0.5])
    1.0
    """
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def interval_of(ratios: Sequence[float], level: float = LEVEL, seed: int = 0) -> Interval:
    """Returns the geometric mean of per-prompt ratios and its bootstrap interval.

    Percentiles of the means of resampled prompts, expanded for small samples (Hesterberg 2015,
    "What teachers should know about the bootstrap"), and never narrower than Student's interval:
    plain percentiles of five prompts cover about 85 % where they promise 95.
    """
    logs = np.log(np.asarray(ratios, dtype=np.float64))
    mean = float(np.exp(logs.mean()))
    if len(logs) < 2:
        return Interval(mean, None, None, len(logs))
    picks = np.random.default_rng(seed).integers(0, len(logs), (RESAMPLES, len(logs)))
    means = logs[picks].mean(1)
    low, high = np.quantile(means, _expanded(level, len(logs)))
    error = logs.std(ddof=1) / math.sqrt(len(logs))
    student = special.stdtrit(len(logs) - 1, (1 + level) / 2) * error
    low, high = min(low, logs.mean() - student), max(high, logs.mean() + student)
    return Interval(mean, float(np.exp(low)), float(np.exp(high)), len(logs))


def _expanded(level: float, count: int) -> tuple[float, float]:
    quantile = special.stdtrit(count - 1, (1 - level) / 2) * math.sqrt(count / (count - 1))
    tail = float(special.ndtr(quantile))
    return tail, 1 - tail


# -- counters of many texts, and the rounds that they were made in -----------------------------


@dataclass(frozen=True)
class AcceptanceCounts:
    """Drafted and accepted tokens; the definitions are those of ``core.stats``."""

    drafted: int
    accepted: int
    emitted: int
    passes: int
    drafted_per_position: tuple[int, ...]
    accepted_per_position: tuple[int, ...]
    judged_per_position: tuple[int, ...] = ()
    """Empty in reports of versions that did not count them."""

    @property
    def rate(self) -> float:
        """Accepted / drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def length(self) -> float:
        """Tokens per target pass, the correction or bonus included."""
        return self.emitted / self.passes if self.passes else 0.0

    @property
    def per_position(self) -> list[float]:
        """Accepted to this depth / drafted to this depth (vLLM's definition)."""
        pairs = zip(self.accepted_per_position, self.drafted_per_position, strict=True)
        return [accepted / drafted for accepted, drafted in pairs if drafted]

    @property
    def conditional(self) -> list[float]:
        """Accepted at this depth / drafted there with all before it accepted (SPEED-Bench's)."""
        pairs = zip(self.accepted_per_position, self.judged_per_position, strict=False)
        return [accepted / judged for accepted, judged in pairs if judged]


def acceptance(metrics: Iterable[Metrics]) -> AcceptanceCounts:
    """Returns the sums over texts."""
    listed = list(metrics)
    return AcceptanceCounts(
        drafted=sum(m.num_draft_tokens for m in listed),
        accepted=sum(m.num_accepted_tokens for m in listed),
        emitted=sum(m.num_emitted_tokens for m in listed),
        passes=sum(m.num_target_passes for m in listed),
        drafted_per_position=_summed([m.drafted_per_position for m in listed]),
        accepted_per_position=_summed([m.accepted_per_position for m in listed]),
        judged_per_position=_summed([m.judged_per_position for m in listed]),
    )


def _summed(columns: Sequence[Sequence[int]]) -> tuple[int, ...]:
    depth = max(map(len, columns), default=0)
    return tuple(sum(c[i] for c in columns if i < len(c)) for i in range(depth))


def rounds_of(metrics: Sequence[Metrics]) -> dict[int, int]:
    """Returns how many rounds drafted how many tokens, for one batch.

    The text that took part in most rounds stands for all: it saw all of them. Of a tree, whose
    counters are by depth, the mean number of nodes is taken.
    """
    if not metrics:
        return {}
    longest = max(metrics, key=lambda m: m.num_target_passes)
    depths = [longest.num_target_passes, *longest.drafted_per_position, 0]
    counts = {k: depths[k] - depths[k + 1] for k in range(len(depths) - 1)}
    if longest.num_draft_tokens != sum(longest.drafted_per_position):
        drafting = longest.drafted_per_position[0]
        nodes = round(longest.num_draft_tokens / drafting)
        counts = {0: counts[0], nodes: drafting}
    return {k: count for k, count in counts.items() if count}


def total_rounds(batches: Iterable[Sequence[Metrics]]) -> dict[int, int]:
    """Returns how many rounds drafted how many tokens, over several batches."""
    total: Counter[int] = Counter()
    for metrics in batches:
        total.update(rounds_of(metrics))
    return dict(total)


def predicted_seconds(rounds: Mapping[int, int], times: Times) -> float:
    """Returns what these rounds cost by the times of their parts: no engine around them."""
    return sum(count * times.round(k) for k, count in rounds.items())


@dataclass(frozen=True)
class Split:
    """Where the seconds went. Prefill is part of ``verify``; ``other`` is the rest of the wall
    time: tokenizing, admission, the loop itself."""

    draft: float
    verify: float
    sample: float
    other: float

    @property
    def total(self) -> float:
        """All seconds."""
        return self.draft + self.verify + self.sample + self.other


def split(runs: Iterable[tuple[float, Sequence[Metrics]]]) -> Split | None:
    """Returns the split of several batches' wall seconds, None where nobody counted."""
    parts = [0.0, 0.0, 0.0, 0.0]
    for seconds, metrics in runs:
        if not metrics:
            return None
        # A round counts whole for each of its rows: the row that saw all rounds stands for all.
        longest = max(metrics, key=lambda m: m.total_seconds)
        own = [longest.draft_seconds, longest.verify_seconds, longest.sample_seconds]
        for index, value in enumerate([*own, max(0.0, seconds - sum(own))]):
            parts[index] += value
    return Split(*parts)


# -- whether texts are the same, and how close the call was where they are not -----------------


Gap = Callable[[Sequence[int], int, int], float | None]
"""``gap(ids, one, other)``: how far apart the target's logits of two tokens are after ``ids``; None
where it cannot say."""


@dataclass(frozen=True)
class TextDifference:
    """The first token at which a text leaves the baseline's."""

    prompt: str
    position: int
    expected: int
    found: int
    gap: float | None
    """Logit of the expected token minus that of the other, in standard deviations of all logits.
    Near 0 the tokens are almost tied, and rounding may have decided."""


@dataclass(frozen=True)
class Identity:
    """How many texts agree with the baseline's, token for token."""

    compared: int
    identical: int
    differences: tuple[TextDifference, ...] = ()

    @property
    def explained(self) -> bool:
        """True where every difference is a near-tie."""
        return all(d.gap is not None and abs(d.gap) < NEAR for d in self.differences)


NEAR = 0.02
"""Largest gap, in standard deviations of the logits, that rounding can close (in bfloat16, which
keeps 8 bits)."""


def compare(
    names: Sequence[str],
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    found: Sequence[Sequence[int]],
    gap: Gap | None = None,
) -> Identity:
    """Returns where each found text leaves the expected one."""
    differences = []
    for name, prompt, ours, theirs in zip(names, prompts, expected, found, strict=True):
        at = first_difference(ours, theirs)
        if at is None:
            continue
        one = ours[at] if at < len(ours) else -1
        other = theirs[at] if at < len(theirs) else -1
        known = gap is not None and one >= 0 and other >= 0
        size = gap([*prompt, *ours[:at]], one, other) if known and gap is not None else None
        differences.append(TextDifference(name, at, one, other, size))
    return Identity(len(expected), len(expected) - len(differences), tuple(differences))


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Returns the first position at which two texts differ, None if they are equal.

    >>> first_difference([1, 2, 3], [1, 2]), first_difference([1], [1])
    (2, None)
    """
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return None if len(one) == len(other) else min(len(one), len(other))


def gap_of(target: Target) -> Gap:
    """Returns a function for the gaps of this target, which reads each text plainly; None for one
    that reads no text by itself."""

    def gap(ids: Sequence[int], one: int, other: int) -> float | None:
        try:
            logits = target.forward_uncached(ids)[-1].double()
        except (UnsupportedModel, NotImplementedError):
            return None
        return float((logits[one] - logits[other]) / logits.std())

    return gap
