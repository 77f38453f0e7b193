"""Chains end where one token more is not expected to repay what it costs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch

from outpace import LLM
from outpace.core.account import Account, Mode
from outpace.core.logits_pipeline import RowOptions
from outpace.core.params import SamplingParams
from outpace.core.proposal import DraftingTerms
from outpace.core.stats import Seconds
from outpace.draft.round import Outcome
from outpace.engine.request import EngineRequest
from outpace.llm import BUNDLED
from outpace.policy.auto import AutoController
from outpace.policy.base import Controller, RoundPlan, cap_budgets
from outpace.policy.lengths.adaptive import Constant
from outpace.policy.shapes import DraftSizes
from outpace.policy.stopping import EarlyStopping

from .test_controller import alone

CHAINS = DraftSizes.chains(16)
SURE, UNSURE = 0.95, 0.35
DRAFTER = BUNDLED / "drafter"
DRAFT, SLOPE = 0.3, 0.05  # what a drafted and a scored token take, in plain rounds


def request(**options: object) -> EngineRequest:
    params = SamplingParams(**{"temperature": 0, **options}).resolve({})
    return EngineRequest(
        [1, 2, 3],
        RowOptions(params),
        0,
        10**6,
        reproducible=params.seed is not None and not params.greedy,
    )


@dataclass
class Drafter:
    """A drafter that is as often right as it is sure, and sure of most tokens."""

    dice: random.Random
    sure_of: float = 0.75

    def next(self) -> tuple[float, bool]:
        """Returns how sure it is of its next token, and whether that is right."""
        sure = SURE if self.dice.random() < self.sure_of else UNSURE
        return sure, self.dice.random() < sure


def chains(
    auto: AutoController, rows: Sequence[EngineRequest], of: Drafter
) -> list[tuple[int, int]]:
    """Returns how many tokens each row drafts in a round, and how many of them are accepted."""
    plan = auto.plan(rows, DraftingTerms())
    budgets, terms = cap_budgets(rows, plan.budgets), plan.terms
    if not any(budgets):
        return [(0, 0)] * len(rows)
    ends = None if terms.make_stopping_fn is None else terms.make_stopping_fn(budgets)
    counts, drafted = list(budgets), [[of.next()] for _ in rows]
    while True:
        length = len(drafted[0])
        if ends is not None:
            sure = torch.tensor([row[-1][0] for row in drafted])
            distribution = torch.stack([1 - sure, sure], 1)
            ended = ends(distribution, torch.ones(len(rows), dtype=torch.long)).tolist()
            counts = [min(n, length) if end else n for n, end in zip(counts, ended, strict=True)]
        if length >= max(counts):
            break
        for row in drafted:
            row.append(of.next())
    found = []
    for count, row in zip(counts, drafted, strict=True):
        wrong = next((place for place, (_, right) in enumerate(row[:count]) if not right), count)
        found.append((count, wrong))
    return found


def play(
    auto: AutoController,
    rows: Sequence[EngineRequest],
    rounds: int,
    of: Drafter,
    watch: Callable[[list[tuple[int, int]]], None] = lambda _: None,
) -> float:
    """Plays rounds; returns the tokens of a row in the time of a plain round."""
    took, tokens = 0.0, 0
    for _ in range(rounds):
        made = chains(auto, rows, of)
        watch(made)
        outcomes = []
        for row, (drafted, accepted) in zip(rows, made, strict=True):
            row.extend([7] * (accepted + 1))
            outcomes.append(Outcome(drafted, drafted, accepted, accepted + 1, method="model"))
            tokens += accepted + 1
        width = max(drafted for drafted, _ in made)
        seconds = Seconds(DRAFT * width, 1 + SLOPE * width, 0.0)
        took += seconds.total
        auto.record(rows, outcomes, seconds)
    return tokens / took / len(rows)


class Ending(Controller):
    """Asks for six tokens in every round, of which each costs nine tenths of a plain round."""

    def __init__(self) -> None:
        self.stopping = EarlyStopping()
        self._own = {}

    def plan(self, requests: Sequence[EngineRequest], terms: DraftingTerms) -> RoundPlan:
        self.stopping.begin(requests)
        self.stopping.set_thresholds(rate=1.0, curve=[1 + 0.9 * width for width in range(9)])
        return RoundPlan([6] * len(requests), self.stopping.terms(requests, terms))

    def record(
        self,
        requests: Sequence[EngineRequest],
        outcomes: Sequence[Outcome],
        seconds: Seconds | None,
    ) -> None:
        for row, outcome in zip(requests, outcomes, strict=True):
            own = self._own.setdefault(row, self.stopping.new())
            if outcome.depth:
                self.stopping.learn(row, own, outcome)

    def account(self, request: EngineRequest) -> Account:
        return Account(Mode.FIXED)


@pytest.mark.parametrize(
    ("config", "temperature"),
    [
        ({"method": "draft_model"}, 0.0),
        ({"method": "draft_model", "verify": "coupled"}, 0.8),
        ({"method": "staged", "model": DRAFTER}, 0.0),
    ],
    ids=["draft_model", "coupled", "staged"],
)
def test_texts_are_the_same_where_chains_end(config: dict[str, Any], temperature: float) -> None:
    llm = LLM(speculative_config=config, max_num_seqs=3)
    llm.engine.controller = Ending()
    prompts = ["Once upon a time", "Lily had a red ball.", "The dog ran to the"]
    drafted: list[int] = []

    def texts(speculative: Literal["off"] | None) -> list[Sequence[int]]:
        params = [
            SamplingParams(temperature=temperature, seed=n, max_tokens=80, speculative=speculative)
            for n in range(len(prompts))
        ]
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    with llm.engine.observing(lambda trace: drafted.extend(d.drafted for d in trace.outcomes)):
        written = texts(None)
    assert len(set(drafted)) > 3, "chains of several lengths"
    llm.engine.controller = Constant(0)
    assert written == texts("off")


def test_a_small_drafter_is_not_looked_at() -> None:
    controller = LLM(speculative_config={"method": "draft_model"}).engine.controller
    assert controller.plan([], DraftingTerms()).terms.make_stopping_fn is None


def test_drafts_that_end_in_time_bring_more() -> None:
    ending = play(alone(CHAINS, can_stop_early=True), [request()], 1500, Drafter(random.Random(1)))
    always = play(alone(CHAINS), [request()], 1500, Drafter(random.Random(1)))
    assert ending > 1.08 * always


@pytest.mark.parametrize("seed", range(4))
def test_what_pays_is_not_given_up_before_it_is_known_how_early_chains_end(seed: int) -> None:
    auto, of, made = (
        alone(CHAINS, can_stop_early=True),
        Drafter(random.Random(seed), sure_of=0.6),
        [],
    )
    for _ in range(4):
        play(auto, [request()], 60, of, made.append)
    assert sum(count > 0 for ((count, _),) in made) > 0.7 * len(made)


def test_a_chain_ends_behind_a_token_of_which_the_drafter_is_not_sure() -> None:
    auto, lengths, row = alone(CHAINS, can_stop_early=True), [], request()
    play(auto, [row], 600, Drafter(random.Random(2)))

    @dataclass
    class Told(Drafter):
        place: int = 0

        def next(self) -> tuple[float, bool]:
            self.place += 1
            return (UNSURE if self.place % 4 == 0 else SURE), True

    play(auto, [row], 40, Told(random.Random(0)), lambda made: lengths.append(made[0][0]))
    # Every fourth token is doubted. It stays in its draft, which ends with it or with its budget.
    assert {4} <= set(lengths) <= {0, 1, 2, 3, 4}


@pytest.mark.parametrize("rows", [2, 4, 9])
def test_a_batch_for_which_drafting_does_not_pay_is_tried_now_and_then(rows: int) -> None:
    auto, made = alone(CHAINS, can_stop_early=True), []
    hopeless = Drafter(random.Random(5), sure_of=0.0)
    play(auto, [request() for _ in range(rows)], 800, hopeless, made.append)
    drafting = [each for each in made if any(count for count, _ in each)]
    assert 2 < len(drafting) < 200


def test_rows_of_a_batch_end_together() -> None:
    auto, made = alone(CHAINS, can_stop_early=True), []
    play(auto, [request() for _ in range(3)], 300, Drafter(random.Random(3)), made.append)
    drafting = [each for each in made if max(each)[0]]
    assert len({each[0][0] for each in drafting}) > 2  # of many lengths
    whole = [each for each in drafting if all(count for count, _ in each)]
    assert whole
    assert all(len({count for count, _ in each}) == 1 for each in whole)


@pytest.mark.parametrize("options", [{"temperature": 1.0, "seed": 7}, {"speculative": 6}])
def test_what_a_row_drafts_by_its_own_rule_is_not_ended(options: dict[str, object]) -> None:
    auto = alone(CHAINS, can_stop_early=True)
    play(auto, [request()], 400, Drafter(random.Random(4)))
    rows = [request(**options), request()]
    plan = auto.plan(rows, DraftingTerms())
    budgets, terms = cap_budgets(rows, plan.budgets), plan.terms
    assert terms.make_stopping_fn is not None
    ends = terms.make_stopping_fn([6, *budgets[1:]])
    doubted = torch.tensor([[0.99, 0.01]] * 2)
    ended = [ends(doubted, torch.tensor([1, 1])).tolist() for _ in range(3)]
    assert not any(own for own, _ in ended)


def test_a_token_that_was_not_drafted_any_more_counts_as_missed() -> None:
    stopping, row = EarlyStopping(), request()
    own = stopping.new()
    stopping.begin([row])
    stopping.set_thresholds(
        rate=100.0, curve=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    )  # nothing is worth that
    begin = stopping.terms([row], DraftingTerms()).make_stopping_fn
    assert begin is not None
    assert begin([4])(torch.tensor([[0.0, 1.0]]), torch.tensor([1])).item()
    outcome = Outcome(1, 1, 1, 2)
    assert stopping.learn(row, own, outcome) == [(1, 0), (1, None)]
    # One that was as long as it could be says nothing about the next token.
    begin([1])(torch.tensor([[0.0, 1.0]]), torch.tensor([1]))
    assert stopping.learn(row, own, outcome) == [(1, 0)]
    reached = stopping.survival_probs([own], 2)
    assert reached[0] == 1.0
    assert reached[1] < 0.9
