"""The published table, and the same formulas on measured times."""

from __future__ import annotations

import math

import pytest

from outpace.bench.theory import (
    Times,
    acceptance_of,
    best_k_from_times,
    ceiling,
    expected_tokens,
    interpolated,
    speedup_from_times,
)

ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
# Leviathan et al.: the best draft length and its speed-up, by c and alpha.
TABLE = {
    0.01: [(5, 1.88), (7, 2.30), (9, 2.97), (14, 4.23), (24, 7.49), (40, 12.54)],
    0.05: [(3, 1.63), (4, 1.92), (6, 2.35), (8, 3.09), (13, 4.67), (21, 6.60)],
    0.10: [(2, 1.46), (3, 1.67), (4, 1.98), (6, 2.47), (10, 3.43), (15, 4.48)],
    0.20: [(1, 1.25), (2, 1.40), (3, 1.58), (4, 1.87), (7, 2.37), (10, 2.87)],
}


def closed_form(alpha: float, k: int, c: float) -> float:
    """Leviathan et al.'s speed-up: scoring k + 1 tokens takes as long as scoring one, and c is the
    time of a drafted token over that."""
    return (1 - alpha ** (k + 1)) / ((1 - alpha) * (k * c + 1))


def flat(c: float, deepest: int = 64) -> Times:
    """Times as the formulas take them: scoring several tokens takes as long as scoring one."""
    return Times(draft={1: c, deepest: c * deepest}, verify={1: 1.0, deepest + 1: 1.0})


@pytest.mark.parametrize("c", TABLE)
def test_the_published_table(c: float) -> None:
    for alpha, (k, gain) in zip(ALPHAS, TABLE[c], strict=True):
        assert closed_form(alpha, k, c) == pytest.approx(gain, abs=0.006), (alpha, c)
        best = best_k_from_times(alpha, flat(c))
        # The maximum is flat: a neighbour may be as good to the last digit shown.
        assert closed_form(alpha, best, c) == pytest.approx(gain, abs=0.006)
        assert abs(best - k) <= 1


def test_a_gain_exists_exactly_where_alpha_exceeds_c() -> None:
    assert best_k_from_times(0.2, flat(0.2 + 1e-9)) == 0
    assert best_k_from_times(0.2, flat(0.2 - 1e-3)) >= 1
    assert closed_form(0.5, 1, 0.1) == pytest.approx(1.5 / 1.1)


def test_expected_tokens_is_the_closed_form() -> None:
    for alpha in ALPHAS:
        assert expected_tokens(alpha, 7) == pytest.approx((1 - alpha**8) / (1 - alpha))


def test_flat_measured_times_give_the_closed_form() -> None:
    for k in range(9):
        assert speedup_from_times(0.7, k, flat(0.1, 8)) == pytest.approx(closed_form(0.7, k, 0.1))


def test_scoring_that_grows_shortens_the_best_draft() -> None:
    growing = Times(draft={1: 0.1, 8: 0.8}, verify={1: 1.0, 9: 5.0})
    assert best_k_from_times(0.7, growing) < best_k_from_times(0.7, flat(0.1, 8))
    hopeless = Times(draft={1: 2.0, 8: 16.0}, verify={1: 1.0, 9: 9.0})
    assert best_k_from_times(0.9, hopeless) == 0
    assert ceiling(hopeless) == (0, 1.0)


def test_the_ceiling_is_that_of_a_drafter_that_is_always_right() -> None:
    times = Times(draft={1: 0.1, 4: 0.4}, verify={1: 1.0, 5: 1.2})
    k, gain = ceiling(times)
    assert k == 4
    assert gain == pytest.approx(5 / 1.6)


def test_curves_go_straight_between_and_beyond_their_points() -> None:
    points = {1: 1.0, 2: 1.0, 6: 3.0}
    assert interpolated(points, 4) == 2.0
    assert interpolated(points, 8) == 4.0
    assert interpolated({3: 2.0}, 9) == 2.0


def test_alpha_from_per_position_counts() -> None:
    # 1000 rounds of 3 at alpha .6: .6, .36, .216
    assert acceptance_of([600, 360, 216], [1000, 600, 360]) == pytest.approx(0.6)
    assert acceptance_of([], []) == 0.0
    assert math.isclose(acceptance_of([5], [10]), 0.5)
