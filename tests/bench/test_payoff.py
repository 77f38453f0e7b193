"""What drafts bring, against values that were worked out by hand."""

from __future__ import annotations

import pytest

from outpace.bench.theory import (
    PlayedDraft,
    Times,
    acceptance_by_depth,
    best_payoff,
    payoff,
)


def test_when_a_drafted_token_is_too_dear() -> None:
    """A draft token costs .59 of a pass and a column .14; at an acceptance of .6 one token brings
    1.6 for 1.73: it would have to cost less than .46, or be accepted in .73 of the cases."""
    times = Times(draft={1: 0.59}, verify={1: 1.0, 2: 1.14})
    rounds = [PlayedDraft(1, 1)] * 6 + [PlayedDraft(1, 0)] * 4
    found = payoff(rounds, times, plain=1.0, length=1)
    assert found.speedup == pytest.approx(1.6 / 1.73)
    assert found.cost == pytest.approx(0.59)
    assert found.affordable == pytest.approx(0.46)
    assert found.needed == pytest.approx(0.73)


def test_columns_that_cost_more_than_they_bring_even_for_nothing() -> None:
    times = Times(draft={1: 0.0}, verify={1: 1.0, 2: 1.8})
    found = payoff([PlayedDraft(1, 1), PlayedDraft(1, 0)], times, 1.0, 1)
    assert found.affordable == pytest.approx(-0.3)
    assert found.needed == pytest.approx(0.8)


def test_rounds_count_with_shorter_drafts_than_they_had() -> None:
    times = Times(draft={1: 0.2, 3: 0.6}, verify={1: 2.0, 4: 5.0})
    rounds = [PlayedDraft(3, 3), PlayedDraft(3, 0), PlayedDraft(1, 1), PlayedDraft(0, 0)]
    whole = payoff(rounds, times, plain=2.0, length=3)
    assert whole.tokens == 2  # 4 + 1 + 2 + 1 in four rounds
    assert whole.drafted == 7 / 4
    assert whole.drafting == pytest.approx((0.6 + 0.6 + 0.2 + 0) / 4 / 2)
    assert whole.scoring == pytest.approx((5 + 5 + 3 + 2) / 4 / 2)
    short = payoff(rounds, times, plain=2.0, length=1)
    assert short.tokens == 1.5  # 2 + 1 + 2 + 1
    assert short.scoring == pytest.approx((3 + 3 + 3 + 2) / 4 / 2)
    assert [payoff(rounds, times, 2.0, k).speedup for k in (1, 2, 3)] == pytest.approx(
        [1.5 / 1.45, 1.75 / 1.75, 2 / 2.05]
    )
    assert best_payoff(rounds, times, 2.0, (1, 2, 3)).length == 1


def test_what_a_plain_round_takes_besides_its_pass_makes_drafts_cheaper() -> None:
    """The engine's own work comes once a round, however many tokens it brings."""
    rounds = [PlayedDraft(1, 1)]
    times = Times(draft={1: 0.5}, verify={1: 1.5, 2: 1.5})
    assert payoff(rounds, times, plain=1.5, length=1).speedup == pytest.approx(2 / (2.0 / 1.5))


def test_a_look_up_that_finds_nothing_brings_nothing() -> None:
    times = Times(draft={}, verify={1: 1.0, 2: 1.1})
    found = best_payoff([PlayedDraft(0, 0)] * 3, times, 1.0, range(1, 5))
    assert found.speedup == 1
    assert (found.drafted, found.cost, found.acceptance) == (0, 0, 0)
    assert found.needed == float("inf")


def test_no_round_is_no_payoff() -> None:
    with pytest.raises(ValueError, match="no round"):
        payoff([], Times({}, {1: 1.0}), 1.0, 1)


def test_acceptance_at_a_depth_is_of_those_that_were_reached() -> None:
    rounds = [PlayedDraft(3, 3), PlayedDraft(3, 1), PlayedDraft(3, 0), PlayedDraft(1, 1)]
    assert acceptance_by_depth(rounds) == [0.75, 0.5, 1.0]
    assert acceptance_by_depth([PlayedDraft(2, 0)]) == [0.0]
    assert acceptance_by_depth([]) == []
