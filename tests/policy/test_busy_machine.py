"""The choice of how much to draft on machines that other processes use, too (`loaded`)."""

from __future__ import annotations

from statistics import mean

import pytest

from outpace.core.stats import Seconds
from outpace.draft.round import Outcome
from outpace.policy.base import Controller, cap_budgets
from outpace.policy.costs import SPEED_CHANGE_ROUNDS, BatchBucket, CostTable
from outpace.policy.curves import MIN_SAMPLES
from outpace.policy.exploration import TrialBudget
from outpace.policy.lengths.adaptive import Constant

from .loaded import Machine, State, tokens_written
from .test_controller import NAME, alone, budgets_of, request

QUIET = State()
MACHINES = {
    "drafting loses": (Machine([State(1.8, 8)]), 0.6),
    "speed jumps": (Machine([QUIET, State(2.5, 2.5)]), 0.75),
    "speed jumps, drafting is dear": (Machine([QUIET, State(2.5, 2.5)], level=0.005), 0.6),
    "drafting loses for seconds": (Machine([QUIET, State(1.8, 8)]), 0.75),
    "useless, often held up": (Machine([QUIET, State(1.8, 5)], held_up=0.15, tail=1.1), 0.1),
}


def speed(controllers: list[Controller], machine: Machine, chance: float) -> float:
    """Tokens in 30 seconds, on average over runs with different jumps."""
    runs = enumerate(controllers)
    return mean(tokens_written(each, machine, chance, 30.0, seed) for seed, each in runs)


@pytest.mark.parametrize("name", MACHINES)
def test_auto_comes_close_to_the_better_of_plain_and_a_fixed_width(name: str) -> None:
    machine, chance = MACHINES[name]
    fixed = max(speed([Constant(width)] * 4, machine, chance) for width in (0, 2, 5))
    auto = speed([alone() for _ in range(4)], machine, chance)
    assert auto > 0.95 * fixed


def test_a_machine_that_changes_is_measured_anew() -> None:
    costs, bucket = CostTable(), BatchBucket.of(1, 10)
    for width in (0, 4):
        for _ in range(10):
            costs.add(bucket, NAME, width, Seconds(0, 1.0 + width, 0))
    costs.add_prefill(NAME, 8.0, 8)
    for _ in range(SPEED_CHANGE_ROUNDS):
        costs.add(bucket, NAME, 0, Seconds(0, 2.0, 0))
    assert costs.plain(bucket) == 2.0
    assert costs.of(bucket, NAME, 4) is None
    assert costs.curve(bucket, NAME, [0, 1]) is None
    assert costs.times_measured(bucket, NAME, 4) == 0
    assert costs.prefill_seconds(NAME, 8, 2.0) == 16.0, "as many plain rounds as before"


def slow_table(bucket: BatchBucket) -> CostTable:
    """Costs of chains of one and two tokens on a slow machine."""
    costs = CostTable()
    for width in (0, 1, 2):
        for _ in range(10):
            costs.add(bucket, NAME, width, Seconds(0, 1.0 + width / 10, 0))
    return costs


def test_a_new_width_that_is_too_fast_lets_plain_rounds_tell_why() -> None:
    """Eight tokens are expected to take 1.8 s, and take 0.9: the machine is twice as fast."""
    bucket = BatchBucket.of(1, 10)
    costs = slow_table(bucket)
    assert not costs.doubted(bucket)
    costs.add(bucket, NAME, 8, Seconds(0, 0.9, 0))
    for _ in range(MIN_SAMPLES):
        assert costs.doubted(bucket)
        costs.add(bucket, NAME, 0, Seconds(0, 0.5, 0))
    assert (costs.doubted(bucket), costs.plain(bucket), costs.changes) == (False, 0.5, 1)
    assert [costs.times_measured(bucket, NAME, width) for width in (1, 2, 8)] == [0, 0, 1]


def test_a_new_width_that_is_cheap_changes_nothing() -> None:
    """On this machine further columns are free; plain rounds take what they took."""
    bucket = BatchBucket.of(1, 10)
    costs = slow_table(bucket)
    costs.add(bucket, NAME, 8, Seconds(0, 1.2, 0))
    for _ in range(MIN_SAMPLES):
        assert costs.doubted(bucket)
        costs.add(bucket, NAME, 0, Seconds(0, 1.0, 0))
    assert (costs.doubted(bucket), costs.changes) == (False, 0)
    assert [costs.times_measured(bucket, NAME, width) for width in (1, 2, 8)] == [10, 10, 1]


def test_while_that_is_open_nothing_is_drafted() -> None:
    auto, row = alone(), request()
    bucket = BatchBucket.of(1, row.length)
    for width in (0, 0, 0, 1, 2):
        auto.costs.add(bucket, NAME, width, Seconds(0, 1.0 + width / 10, 0))
    assert budgets_of(auto, [row]) != [0]
    auto.costs.add(bucket, NAME, 8, Seconds(0, 0.9, 0))
    assert budgets_of(auto, [row]) == [0]


def test_losses_on_a_machine_that_has_changed_are_forgotten() -> None:
    budget = TrialBudget()
    budget.enter(3.0)
    assert not budget.allows(0.1)
    budget.renew()
    assert budget.allows(0.1)
    budget.enter(-2.0)
    budget.renew()
    assert budget.lost == -2.0


def test_single_rounds_that_are_held_up_change_nothing() -> None:
    costs, bucket = CostTable(), BatchBucket.of(1, 10)
    for number in range(60):
        costs.add(bucket, NAME, number % 2, Seconds(0, 9.0 if number % 4 == 3 else 1.0, 0))
    assert all(costs.of(bucket, NAME, width) for width in (0, 1))


def play(asking: float, rounds: int = 600) -> tuple[float, int]:
    """Plays a drafter that finds something useful in one round of 20, and whose asking takes
    ``asking`` plain rounds; returns the tokens per plain round's time, and the rounds in which it
    was asked at the end."""
    auto, row, seconds, tokens, asked = alone(), request(), 0.0, 0, 0
    for number in range(rounds):
        (budget,) = cap_budgets([row], budgets_of(auto, [row]))
        width = min(budget, 3) if number % 20 == 0 else 0
        took = Seconds(asking if budget else 0.0, 1.0, 0.0)
        row.extend([2] * (1 + width))
        auto.record([row], [Outcome(width, width, width, 1 + width)], took)
        seconds, tokens = seconds + took.total, tokens + 1 + width
        asked += bool(budget) and number >= rounds // 2
    return tokens / seconds, asked


def test_asking_that_costs_more_than_it_finds_is_given_up() -> None:
    speed_, asked = play(asking=0.3)
    assert speed_ > 0.95
    assert asked < 40
    free, always = play(asking=0.0)
    assert free > 1.08
    assert always > 250
