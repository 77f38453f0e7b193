"""Geometric means of ratios, with intervals that assume no distribution of the noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

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
        """Whether the ratio can be told from 1."""
        if self.low is None or self.high is None:
            return not 1 / UNSURE <= self.mean <= UNSURE
        return 1.0 not in self

    @property
    def ratio(self) -> str:
        """The ratio in words; "none" where it cannot be told from 1.

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
    def told(self) -> str:
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
    student = stats.t.ppf((1 + level) / 2, len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs))
    low, high = min(low, logs.mean() - student), max(high, logs.mean() + student)
    return Interval(mean, float(np.exp(low)), float(np.exp(high)), len(logs))


def _expanded(level: float, count: int) -> tuple[float, float]:
    quantile = stats.t.ppf((1 - level) / 2, count - 1) * math.sqrt(count / (count - 1))
    tail = float(stats.norm.cdf(quantile))
    return tail, 1 - tail
