"""The choice of how much to draft, against simulated clocks and simulated acceptance."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from outpace.core.logits_pipeline import RowOptions
from outpace.core.params import SamplingParams
from outpace.core.proposal import DraftingTerms
from outpace.core.stats import Seconds
from outpace.core.trees.tree_shape import TreeShape
from outpace.draft.round import Outcome
from outpace.engine.request import EngineRequest
from outpace.policy.acceptance import Acceptance
from outpace.policy.auto import AutoController
from outpace.policy.base import Controller, cap_budgets
from outpace.policy.costs import MAX_SAMPLES, BatchBucket, CostTable
from outpace.policy.estimator import Estimator, RoundRequests
from outpace.policy.lengths.adaptive import Constant
from outpace.policy.nominal import NominalCosts
from outpace.policy.shapes import DraftSizes, GrownTrees, best_of_size
from representatives import representatives

COSTS = NominalCosts(level=0.1, node=0.04, started=0.1)
MOST = 10
CHAINS = DraftSizes.chains(MOST)
NAME = "drafter"

Cost = Callable[[int, int], float]  # rows, width -> seconds
Chance = Callable[[int, int], float]  # tokens generated, depth -> chance of acceptance


def flat(draft: float, slope: float = 0.02) -> Cost:
    """A machine on which scoring w + 1 tokens costs 1 + slope * w, and drafting each ``draft``."""
    return lambda rows, width: 1 + width * (draft + slope)


def crowded(rows: int, width: int) -> float:
    """A machine that computes no more than eight tokens at the price of one."""
    return max(1.0, rows * (width + 1) / 8) + 0.1 * width


def request(tokens: int = 100_000, prompt: int = 8, **options: object) -> EngineRequest:
    params = SamplingParams(**{"temperature": 0, **options}).resolve({})
    return EngineRequest(
        [1] * prompt,
        RowOptions(params),
        seed=0,
        max_tokens=tokens,
        reproducible=params.seed is not None and not params.greedy,
    )


def alone(
    drafts: DraftSizes | GrownTrees = CHAINS,
    nominal: NominalCosts | None = None,
    name: str = NAME,
    **options: Any,
) -> AutoController:
    """Returns the controller of one drafter."""
    return AutoController([Estimator(name, drafts, nominal, **options)])


def budgets_of(auto: AutoController, rows: Sequence[EngineRequest]) -> list[int]:
    return list(auto.plan(rows, DraftingTerms()).budgets)


class Simulation:
    """Plays rounds of a pretended engine; ``found`` caps what the drafter finds to propose."""

    def __init__(self, controller: Controller, cost: Cost, chance: Chance, seed: int = 0) -> None:
        self.controller, self.cost, self.chance = controller, cost, chance
        self.random = random.Random(seed)
        self.seconds = 0.0
        self.tokens = 0
        self.sizes: list[int] = []
        self.drafting: list[int] = []  # rows, by round
        self.catching_up = 0.0  # what a first draft takes besides

    def play(
        self, rows: Sequence[EngineRequest], rounds: int, found: Callable[[], int] = lambda: MOST
    ) -> Simulation:
        for _ in range(rounds):
            budgets = cap_budgets(rows, self.controller.plan(rows, DraftingTerms()).budgets)
            outcomes = [
                self.outcome(row, min(budget, found()))
                for row, budget in zip(rows, budgets, strict=True)
            ]
            width = max(outcome.drafted for outcome in outcomes)
            noise = self.random.uniform(0.95, 1.05) * (3 if self.random.random() < 0.02 else 1)
            took = self.cost(len(rows), width)
            self.sizes.append(width)
            self.seconds += took
            self.tokens += sum(outcome.emitted for outcome in outcomes)
            late = self.catching_up if width and not (self.drafting and self.drafting[-1]) else 0.0
            self.drafting.append(sum(outcome.drafted > 0 for outcome in outcomes))
            self.controller.record(rows, outcomes, Seconds(late, took * noise, 0))
        return self

    def outcome(self, row: EngineRequest, drafted: int) -> Outcome:
        accepted = 0
        while accepted < drafted:
            if self.random.random() >= self.chance(len(row.output_ids), accepted):
                break
            accepted += 1
        taken = row.extend([2] * (accepted + 1))
        return Outcome(drafted, drafted, accepted, taken)

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def best_fixed(cost: Cost, chance: float, rows: int = 1) -> float:
    """Tokens per second of the best constant width."""
    tokens = DraftSizes.chains(MOST).tokens([[chance]] * MOST, room=MOST)
    return max(rows * tokens[width] / cost(rows, width) for width in tokens)


@pytest.mark.parametrize(
    ("chance", "draft"),
    representatives(
        itertools.product([0.3, 0.5, 0.75, 0.9, 0.98], [0.02, 0.14, 0.4]),
        [(0.3, 0.4), (0.75, 0.02), (0.75, 0.14), (0.75, 0.4), (0.98, 0.14)],
    ),
)
def test_within_five_percent_of_the_best_fixed_width(chance: float, draft: float) -> None:
    cost = flat(draft)
    speeds = [
        Simulation(alone(), cost, lambda *_: chance, seed).play([request()], 1000).speed
        for seed in range(4)
    ]
    assert sum(speeds) / 4 > 0.95 * best_fixed(cost, chance)


@pytest.mark.parametrize(
    ("chance", "draft", "seed"),
    representatives(
        itertools.product([0.0, 0.02, 0.05], [0.02, 0.14, 0.4], range(3)),
        lambda chance, draft, seed: seed == 0,
    ),
)
def test_a_useless_drafter_costs_three_percent_at_most(
    chance: float, draft: float, seed: int
) -> None:
    auto = Simulation(alone(), flat(draft), lambda *_: chance, seed)
    for _ in range(5):
        auto.play([request()], 100)
    assert auto.speed > 0.97


def test_a_drafter_that_gets_better_is_found_out() -> None:
    auto = Simulation(alone(), flat(0.1), lambda tokens, _: 0.9 if tokens > 400 else 0.0)
    row = request()
    auto.play([row], 400)
    assert max(auto.sizes[-50:]) <= 1
    auto.play([row], 300)
    assert sum(auto.sizes[-100:]) / 100 > 3


def test_drafting_stops_where_the_batch_fills_the_machine() -> None:
    auto = alone()
    one = Simulation(auto, crowded, lambda *_: 0.7).play([request()], 300)
    full = Simulation(auto, crowded, lambda *_: 0.7).play([request() for _ in range(16)], 500)
    assert sum(one.sizes[-100:]) / 100 > 2
    assert sum(full.sizes[-100:]) / 100 < 0.2
    assert full.speed > 0.97 * 16 / crowded(16, 0)


def rows_drafting(cost: Cost) -> list[int]:
    """How many of 16 rows draft, by round."""
    rows = [request() for _ in range(16)]
    play = Simulation(alone(), cost, lambda *_: 0.9)
    play.play(rows, 200)
    return play.drafting


def test_one_row_tries_drafts_for_all() -> None:
    assert set(rows_drafting(crowded)) == {0, 1}
    assert rows_drafting(flat(0.1))[-100:].count(16) > 90, "what pays, pays in all rows"


def test_one_trial_tells_what_cannot_pay() -> None:
    auto, rows = alone(), [request() for _ in range(16)]
    play = Simulation(auto, lambda rows, width: 1 + 2 * width, lambda *_: 0.9)
    play.catching_up = 3.0
    play.play(rows, 60)
    assert play.drafting.count(1) == 1
    assert max(play.drafting) == 1


def test_what_cannot_pay_is_not_weighed_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    weighed: list[BatchBucket] = []
    curve = CostTable.curve

    def counted(
        self: CostTable, bucket: BatchBucket, name: str, levels: Sequence[int]
    ) -> Sequence[float] | None:
        weighed.append(bucket)
        return curve(self, bucket, name, levels)

    monkeypatch.setattr(CostTable, "curve", counted)
    auto, rows = alone(), [request() for _ in range(4)]
    play = Simulation(auto, lambda rows, width: 1 + 2 * width, lambda *_: 0.9)
    play.play(rows, 60)
    weighed.clear()
    play.play(rows, 2 * MAX_SAMPLES)
    assert 1 <= len(weighed) <= 4
    weighed.clear()
    play.play([*rows[:2], request(), request()], 1)
    assert weighed, "of rows that join nothing is known"


@pytest.mark.parametrize(("tokens", "drafts"), [(5, False), (200, True)])
def test_what_a_drafter_reads_first_must_pay(tokens: int, drafts: bool) -> None:
    auto = alone()
    known = Simulation(auto, flat(0.1), lambda *_: 0.9)
    known.catching_up = 8.0  # for a prompt of eight tokens
    known.play([request()], 60)
    assert known.sizes[-1] > 0
    fresh = request(8 + tokens)
    fresh.extend([2] * 8)  # it may be read by now
    (budget,) = budgets_of(auto, [fresh])
    assert (budget > 0) == drafts


@pytest.mark.parametrize("needs_no_prefill", [True, False])
def test_what_needs_no_prefill_has_nothing_to_read(needs_no_prefill: bool) -> None:
    auto = alone(CHAINS, needs_no_prefill=needs_no_prefill)
    Simulation(auto, flat(0.1), lambda *_: 0.9).play([request()], 60)
    for _ in range(MAX_SAMPLES):
        auto.costs.add_prefill(NAME, seconds=8.0, tokens=8)
    (budget,) = budgets_of(auto, [request(5)])
    assert (budget > 0) == needs_no_prefill


@pytest.mark.parametrize(("tokens", "drafts"), [(10, False), (60, True)])
def test_beside_others_a_drafter_reads_what_is_expected_to_repay_it(
    tokens: int, drafts: bool
) -> None:
    auto = alone()
    known = Simulation(auto, flat(0.1), lambda *_: 0.9)
    known.catching_up = 7.0  # for a prompt of eight tokens
    known.play([request()], 60)
    beside, other = request(8 + tokens), request(200)
    for row in (beside, other):
        row.extend([2] * 8)  # it may be read by now
    drafter = auto._candidates[NAME]
    (width,) = drafter.plan(RoundRequests([beside], [beside]), lambda _: 0.9).sizes
    assert (width > 0) == drafts, "9 or 54 seconds saved, where reading takes 14"
    assert drafter.plan(RoundRequests([other], [other])).sizes[0] > 0, (
        "alone it is all that there is"
    )


def test_requests_of_one_batch_are_chosen_for_together() -> None:
    rows = [request(), request()]
    auto = alone()
    play = Simulation(auto, flat(0.1), lambda *_: 0.0)
    play.outcome = lambda row, drafted: _all_or_nothing(row, drafted, row is rows[0])  # type: ignore[method-assign]
    play.play(rows, 200)
    levels = auto[NAME].acceptance
    good, bad = (levels.chances(auto[NAME].text(row).counts, 3)[0][0] for row in rows)
    assert good > 0.8
    assert bad < 0.2
    assert sum(play.sizes[-50:]) / 50 > 3  # (11 + 1) / T beats (1 + 1) / T(0)


def _all_or_nothing(row: EngineRequest, drafted: int, good: bool) -> Outcome:
    accepted = drafted if good else 0
    return Outcome(drafted, drafted, accepted, row.extend([2] * (accepted + 1)))


def test_a_miss_teaches_nothing() -> None:
    auto = alone()
    play = Simulation(auto, flat(0.0), lambda *_: 0.8)
    row = request()
    play.play([row], 60, found=lambda: 0)
    fresh = Acceptance()
    assert auto[NAME].acceptance.chances(fresh.new(), 3) == fresh.chances(fresh.new(), 3)
    assert budgets_of(auto, [row]) == [1]  # asking costs nothing, so it goes on
    play.play([row], 200, found=lambda: play.random.choice([0, 0, 6]))
    assert max(play.sizes) == 6


def test_trees_of_any_shape_promise_what_their_levels_bring() -> None:
    """Ten nodes of a look-up's tree are two levels here, of which each is accepted in 9 of 10
    rounds: that is not what ten levels would bring, and two more nodes for one level cost much."""
    dice = random.Random(0)

    def outcome(row: EngineRequest, width: int) -> Outcome:
        levels = -(-width // 5)
        accepted = next((n for n in range(levels) if dice.random() > 0.9), levels)
        return Outcome(width, levels, accepted, row.extend([2] * (accepted + 1)))

    auto, row = alone(), request()
    for _ in range(300):
        result = outcome(row, cap_budgets([row], budgets_of(auto, [row]))[0])
        auto.record([row], [result], Seconds(0, 1 + 0.02 * result.drafted, 0))
    assert auto[NAME].tokens(row, 10) == pytest.approx(1 + 0.9 + 0.81, rel=0.1)
    assert auto[NAME].seconds(RoundRequests([row], [row]), 10) is not None


def test_rounds_without_a_find_do_not_lower_what_finds_are_worth() -> None:
    auto, row = alone(), request()
    play = Simulation(auto, flat(0.0), lambda *_: 0.9)
    play.play([row], 300, found=lambda: play.random.choice([0, 0, 0, 0, 8]))
    assert auto[NAME].tokens(row, 8) == pytest.approx(sum(0.9**k for k in range(9)), rel=0.12)


@pytest.mark.parametrize(("price", "pays"), [(0.28, False), (0.05, True)])
def test_drafts_of_some_rows_must_pay_for_all(price: float, pays: bool) -> None:
    """One row in four finds something, of which six tenths are accepted: 1.15 tokens a row. A
    round with a draft takes as long for the other three."""
    auto, rows = alone(), [request() for _ in range(4)]
    play = Simulation(auto, lambda rows, width: 1 + price * (width > 0), lambda *_: 0.6)
    turn = itertools.count()
    play.play(rows, 1500, found=lambda: 0 if next(turn) % 4 else 1)
    assert play.speed > 0.97 * 4
    assert (sum(width > 0 for width in play.sizes[-500:]) > 250) == pays


def test_an_ended_text_teaches_nothing() -> None:
    auto = alone()
    row = request(tokens=3)
    budgets_of(auto, [row])
    row.extend([2, 2, 2])
    auto.record([row], [Outcome(5, 5, 2, 3)], Seconds(1, 1, 0))
    fresh = Acceptance()
    assert auto[NAME].acceptance.chances(fresh.new(), 3) == fresh.chances(fresh.new(), 3)


def test_wishes_and_what_is_left_bind_every_controller() -> None:
    rows = [request(speculative="off"), request(speculative=3), request(tokens=2), request()]
    assert cap_budgets(rows, Constant(5).budgets(rows)) == [0, 3, 1, 5]
    auto = alone()
    Simulation(auto, flat(0.1), lambda *_: 0.9).play([request()], 50)
    budgets = cap_budgets(rows, budgets_of(auto, rows))
    assert budgets[:2] == [0, 3]
    assert budgets[2] <= 1


def test_a_seeded_sampled_text_does_not_depend_on_times() -> None:
    seeded = {"temperature": 1, "seed": 7}
    sizes = []
    for seconds in (1e-6, 1.0, 1e6):
        play = Simulation(alone(CHAINS, COSTS), crowded_at(seconds), lambda *_: 0.6)
        sizes.append(play.play([request(**seeded)], 60).sizes)
    assert sizes[0] == sizes[1] == sizes[2]
    assert max(sizes[0]) > 1
    coupled = replace(request(**seeded), reproducible=False)
    assert budgets_of(alone(), [coupled]) == [0]  # a plain round comes first
    assert budgets_of(alone(), [request(temperature=1)]) == [0]
    assert budgets_of(alone(), [request(temperature=0, seed=7)]) == [0]


def test_a_round_without_a_price_teaches_all_but_times() -> None:
    timed, untimed = alone(), alone()
    rows = [request(temperature=1.0, seed=7), request(temperature=1.0, seed=7)]
    outcome = Outcome(4, 4, 1, 2)
    for _ in range(20):
        timed.record(rows[:1], [outcome], Seconds(0, 1, 0))
        untimed.record(rows[1:], [outcome], None)
    assert budgets_of(timed, rows[:1]) == budgets_of(untimed, rows[1:])
    assert timed.costs.buckets
    assert not untimed.costs.buckets


def crowded_at(seconds: float) -> Cost:
    return lambda rows, width: seconds * (1 + width**3)


def test_trees_are_cut_between_levels() -> None:
    ladder = DraftSizes.by_level(TreeShape.branching([4, 1, 1]))
    assert ladder.levels == {0: 0, 4: 1, 8: 2, 12: 3}
    auto = alone(ladder)
    row = request()
    for _ in range(40):
        width = budgets_of(auto, [row])[0]
        assert width in ladder.values
        depth = ladder.levels[width]
        row.extend([2] * (depth + 1))
        outcome = Outcome(width, depth, depth, depth + 1, (1, 5, 9)[:depth])
        auto.record([row], [outcome], Seconds(0, 1 + width / 40, 0))
    assert budgets_of(auto, [row]) == [12]


def grow(
    auto: AutoController, chances: Sequence[float], level: float, node: float, rounds: int
) -> TreeShape:
    """Plays rounds in which siblings have these chances; returns the tree that is drafted then."""
    dice, row = random.Random(0), request()
    for _ in range(rounds):
        plan = auto.plan([row], DraftingTerms())
        width = cap_budgets([row], plan.budgets)[0]
        shape = (plan.shape or TreeShape(())).first(width)
        path, here = [], 0
        while here is not None:
            children = zip(shape.children[here], chances, strict=False)
            here = next((child for child, p in children if dice.random() < p), None)
            path += [] if here is None else [here]
        row.extend([2] * (len(path) + 1))
        height = shape.height
        seconds = Seconds(level * height, 1 + node * width, 0)
        outcome = Outcome(width, height, len(path), len(path) + 1, tuple(path))
        auto.record([row], [outcome], seconds)
    plan = auto.plan([row], DraftingTerms())
    return (plan.shape or TreeShape(())).first(plan.budgets[0])


def test_a_tree_is_as_deep_and_as_wide_as_pays() -> None:
    deep = grow(alone(GrownTrees(COSTS)), [0.9, 0.1, 0.1, 0.1], level=0.05, node=0.1, rounds=600)
    assert deep.is_chain
    assert deep.size > 3
    wide = grow(alone(GrownTrees(COSTS)), [0.5, 0.5, 0.5, 0.5], level=0.4, node=0.01, rounds=600)
    assert wide.max_siblings == 4
    assert wide.height < deep.height


def test_a_tree_is_no_deeper_than_the_drafter_can_guess() -> None:
    """A drafter leaves deeper nodes out, and the others would have other numbers then."""
    shallow = alone(GrownTrees(COSTS, max_depth=2))
    assert grow(shallow, [0.9, 0.1, 0.1, 0.1], level=0.05, node=0.1, rounds=600).height <= 2
    assert GrownTrees(COSTS, most=9, max_depth=2).static.shape.height <= 2


@pytest.mark.parametrize("level", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("nodes", [1, 5, 8, 9, 24, 60])
def test_a_number_of_nodes_is_that_number(nodes: int, level: float) -> None:
    costs = NominalCosts(level=level)
    shape = best_of_size(nodes, costs, None, 4)
    assert shape.size == nodes
    chances = [[0.7 * 0.5**rank for rank in range(4)]] * nodes

    def rate(shape: TreeShape) -> float:
        return (1 + sum(shape.reached(chances))) / costs.round(shape.size, shape.height)

    assert rate(shape) >= rate(TreeShape.chain(nodes))
    assert best_of_size(nodes, costs, None, 1).is_chain
    assert best_of_size(nodes, costs, 2, 4).height <= 2


def test_a_tree_that_cannot_pay_is_hardly_tried() -> None:
    auto = alone(GrownTrees(replace(COSTS, level=0.4)))
    assert grow(auto, [0.02, 0.0, 0.0, 0.0], level=0.4, node=0.1, rounds=500).size <= 1


def test_a_seeded_row_is_offered_the_same_trees_whatever_was_learned() -> None:
    auto, fresh = alone(GrownTrees(COSTS)), alone(GrownTrees(COSTS))
    grow(auto, [0.9, 0.1, 0.1, 0.1], level=0.05, node=0.1, rounds=168)
    terms, seeded = DraftingTerms(), request(temperature=1.0, seed=7)
    learned = auto.plan([request()], terms).shape
    found, expected = (one.plan([seeded, request()], terms) for one in (auto, fresh))
    assert found.budgets[0] == expected.budgets[0]
    assert found.shape == expected.shape
    assert found.shape != learned
    wished = auto.plan([request(temperature=1.0, seed=7, speculative=3)], terms)
    assert wished.shape == expected.shape, "also where it says itself how much to draft"
    assert auto.plan([request()], terms).shape == learned


def test_finished_requests_are_forgotten() -> None:
    auto = alone()
    for _ in range(50):
        Simulation(auto, flat(0.1), lambda *_: 0.5).play([request()], 3)
    assert len(auto[NAME]._texts.values()) <= 1


def test_costs_between_and_beyond_what_was_measured() -> None:
    costs, bucket = CostTable(), BatchBucket.of(1, 10)
    assert costs.curve(bucket, NAME, range(5)) is None
    costs.add(bucket, NAME, 0, Seconds(0, 1, 0))
    assert costs.curve(bucket, NAME, range(5)) is None
    costs.add(bucket, NAME, 2, Seconds(0.5, 1, 0))
    assert costs.curve(bucket, NAME, range(5)) == [1.0, 1.25, 1.5, 1.75, 2.0]
    far = BatchBucket.of(1, 3000)
    costs.add(far, NAME, 0, Seconds(0, 2, 0))
    assert costs.curve(far, NAME, range(3)) == [2.0, 2.5, 3.0]
    found = costs.of(bucket, NAME, 2)
    assert found is not None
    assert (found.total, found.draft, found.measured) == (1.5, 0.5, 1)
    assert costs.of(bucket, NAME, 3) is None
    assert costs.curve(bucket, "another", range(3)) is None
    assert costs.of(bucket, "another", 0) == costs.of(bucket, NAME, 0), (
        "plain rounds are everybody's"
    )
    assert BatchBucket.of(5, 600) == BatchBucket.of(8, 1024)
    assert costs.buckets == [bucket, far]


def test_nodes_of_one_level_share_its_pass() -> None:
    costs, bucket = CostTable(), BatchBucket.of(1, 10)
    costs.add(bucket, NAME, 0, Seconds(0, 1.0, 0), levels=0)
    costs.add(bucket, NAME, 1, Seconds(0.5, 1.1, 0), levels=1)
    assert costs.curve(bucket, NAME, [0, 1, 1, 2]) == pytest.approx([1.0, 1.6, 1.7, 2.3])
    assert costs.marginal_costs(bucket, NAME, forked=0.2) == pytest.approx((0.5, 0.1))
    costs.add(bucket, NAME, 4, Seconds(1.0, 1.6, 0), levels=2)  # 0.2 of it for comparing siblings
    assert costs.marginal_costs(bucket, NAME, forked=0.2) == pytest.approx((0.5, 0.1))
    costs.add(bucket, NAME, 1, Seconds(0.9, 1.1, 0), levels=2)
    assert costs.times_measured(bucket, NAME, 1) == 1, "another number of passes is another draft"


def test_drafting_is_never_free() -> None:
    costs, bucket = CostTable(), BatchBucket.of(1, 10)
    costs.add(bucket, NAME, 0, Seconds(0, 2.0, 0))  # others had the memory, then
    costs.add(bucket, NAME, 2, Seconds(0.5, 1.0, 0))
    assert costs.curve(bucket, NAME, range(5)) == [2.0, 2.25, 2.5, 2.75, 3.0]


def test_one_round_that_was_held_up_does_not_hide_that_wider_drafts_pay() -> None:
    costs, bucket = CostTable(), BatchBucket.of(1, 10)
    for width, seconds in {0: 1.0, 1: 1.05, 4: 1.2, 16: 1.8}.items():
        for _ in range(3):
            costs.add(bucket, NAME, width, Seconds(0, seconds, 0))
    costs.add(bucket, NAME, 12, Seconds(0, 3.5, 0))
    curve = costs.curve(bucket, NAME, range(17))
    assert curve is not None
    assert curve[12] == pytest.approx(1.6)
    assert curve[16] == pytest.approx(1.8)
    for _ in range(2):  # so it was not held up
        costs.add(bucket, NAME, 12, Seconds(0, 3.5, 0))
    again = costs.curve(bucket, NAME, range(17))
    assert again is not None
    assert again[12] == again[16] == pytest.approx(3.5)


def test_the_median_forgets_a_disturbed_round() -> None:
    costs, bucket = CostTable(), BatchBucket.of(1, 10)
    for seconds in (1.0, 1.0, 90.0):
        costs.add(bucket, NAME, 0, Seconds(0, seconds, 0))
    assert costs.plain(bucket) == 1.0


def test_a_drafter_that_stands_for_others_is_one_drafter() -> None:
    """What is learned does not depend on which of its children drafted."""
    auto, row = alone(), request()
    for width, method in ((0, ""), (4, "one"), (4, "other"), (0, "")):
        budgets_of(auto, [row])
        outcome = Outcome(width, width, width, width + 1, method=method)
        row.output_ids += [1] * outcome.emitted
        auto.record([row], [outcome], Seconds(0.5 * width, 1, 0))
    bucket = auto.costs.buckets[0]
    assert [w for w in range(9) if auto.costs.of(bucket, NAME, w)] == [0, 4]
    assert auto[NAME].acceptance.typical(1)[0][0] > Acceptance().typical(1)[0][0]


def test_a_seldom_measured_kind_of_round_follows_the_machine() -> None:
    costs, bucket = CostTable(), BatchBucket.of(1, 10)
    for _ in range(20):
        costs.add(bucket, NAME, 0, Seconds(0, 1.2, 0))
    for number in range(3 * 192):  # the machine is a little faster now, and rarely plays these
        costs.add(bucket, NAME, 1, Seconds(0, 1.5, 0))
        if number % 48 == 0:
            costs.add(bucket, NAME, 0, Seconds(0, 1.0, 0))
    assert costs.plain(bucket) == 1.0
