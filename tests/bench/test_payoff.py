"""What drafts bring, against values that were worked out by hand."""

from __future__ import annotations

import pytest

from outpace.bench.theory import (
    Machine,
    PassWork,
    PlayedDraft,
    Times,
    acceptance_by_depth,
    best_k_from_times,
    best_payoff,
    pass_seconds,
    payoff,
    predicted_payoff,
    roofline_times,
    speedup_from_times,
    tokens_of_round,
)

# 1 GB at 20 GB/s: 50 ms. 1.5 G multiply-adds on 2 cores of 75 G: 10 ms a column.
WORK, MACHINE = PassWork(1e9, 1.5e9), Machine(20e9, 75e9, 2)


def test_a_pass_takes_the_slower_of_reading_and_computing() -> None:
    seconds = [pass_seconds(WORK, MACHINE, n) for n in (1, 5, 6, 8)]
    assert seconds == pytest.approx([0.05, 0.05, 0.06, 0.08])
    one_core = Machine(20e9, 75e9, 1)
    assert pass_seconds(WORK, one_core, 6) == pytest.approx(0.12)
    fast_memory = Machine(200e9, 75e9, 2)
    assert pass_seconds(WORK, fast_memory, 1) == pytest.approx(0.01)


def test_tokens_of_a_round_by_depth() -> None:
    assert tokens_of_round([0.8, 0.5, 0.5], 0) == 1
    assert tokens_of_round([0.8, 0.5, 0.5], 1) == pytest.approx(1.8)
    assert tokens_of_round([0.8, 0.5, 0.5], 3) == pytest.approx(1 + 0.8 + 0.4 + 0.2)


def test_the_best_length_on_a_machine() -> None:
    # Four columns cost what one does. k: 1.8 / 1.2, 2.2 / 1.4, 2.4 / 1.6.
    found = predicted_payoff(WORK, MACHINE, 0.2, [0.8, 0.5, 0.5])
    assert found.length == 2
    assert found.speedup == pytest.approx(2.2 / 1.4)
    assert found.cost == pytest.approx(0.2)
    assert found.acceptance == pytest.approx(0.6)


def test_columns_that_cost_end_drafts_sooner() -> None:
    # 50 ms of reading, 40 ms a column: two take 1.6 passes, three 2.4.
    slow = Machine(20e9, 18.75e9, 2)
    assert pass_seconds(WORK, slow, 2) == pytest.approx(0.08)
    found = predicted_payoff(WORK, slow, 0.05, [0.9, 0.9, 0.9])
    assert found.length == 1
    assert found.speedup == pytest.approx(1.9 / 1.65)
    assert predicted_payoff(WORK, slow, 0.4, [0.9, 0.9, 0.9]).length == 0


def test_the_desktop_of_the_documentation() -> None:
    """.98 GB at 60 GB/s: 16.3 ms, in which 8 cores of 77 G compute 6.5 columns of 1.54 G. k: 1.8 /
    1.35, 2.4 / 1.7, 2.82 / 2.05."""
    desktop = Machine(60e9, 77e9, 8)
    found = predicted_payoff(PassWork(0.98e9, 1.54e9), desktop, 0.35, [0.8, 0.75, 0.7])
    assert found.length == 2
    assert found.speedup == pytest.approx(2.4 / 1.7)


def test_a_machine_that_cannot_gain_decodes_plainly() -> None:
    found = predicted_payoff(WORK, MACHINE, 0.7, [0.6, 0.6])
    assert (found.length, found.tokens, found.speedup) == (0, 1, 1)


def test_the_same_acceptance_at_all_depths_is_the_published_formula() -> None:
    times = roofline_times(WORK, MACHINE, 0.1, 8)
    found = predicted_payoff(WORK, MACHINE, 0.1, [0.7] * 8)
    assert found.length == best_k_from_times(0.7, times)
    assert found.speedup == pytest.approx(speedup_from_times(0.7, found.length, times))


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
