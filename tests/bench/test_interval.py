"""Bootstrap intervals: known data, and that they cover what they promise."""

from __future__ import annotations

import numpy as np
import pytest

from outpace.bench.statistics import geometric_mean, interval_of


def test_the_mean_is_geometric() -> None:
    assert interval_of([4.0, 1.0]).mean == pytest.approx(2.0)
    assert geometric_mean([8.0, 1.0, 1.0]) == pytest.approx(2.0)


def test_equal_ratios_leave_no_doubt_and_one_ratio_says_nothing_about_it() -> None:
    same = interval_of([1.7] * 5)
    assert (same.low, same.high) == (pytest.approx(1.7), pytest.approx(1.7))
    alone = interval_of([1.7])
    assert alone.low is None
    assert 1.7 not in alone


def test_the_interval_is_symmetric_under_inversion() -> None:
    ratios = np.exp(np.random.default_rng(1).normal(0.3, 0.2, 30))
    there, back = interval_of(list(ratios)), interval_of(list(1 / ratios))
    assert there.low is not None
    assert back.high is not None
    assert there.low == pytest.approx(1 / back.high, rel=0.01)


@pytest.mark.parametrize("count", [5, 12, 40])
def test_it_covers_the_truth_about_as_often_as_it_says(count: int) -> None:
    rng = np.random.default_rng(count)
    trials = 200
    hits = sum(1.0 in interval_of(list(np.exp(rng.normal(0, 0.1, count)))) for _ in range(trials))
    assert hits / trials > 0.92


def test_it_shrinks_with_the_number_of_prompts() -> None:
    rng = np.random.default_rng(0)
    widths = []
    for count in (10, 1000):
        found = interval_of(list(np.exp(rng.normal(0, 0.1, count))))
        assert found.low is not None
        assert found.high is not None
        widths.append(found.high - found.low)
    assert widths[1] < widths[0] / 5
