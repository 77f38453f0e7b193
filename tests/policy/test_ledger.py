"""The choice of how much to draft where no clock may decide."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from engine.test_auto import CONFIGS, PROMPTS, llama
from outpace.core.params import SamplingParams
from outpace.core.trees.tree_shape import Trail, TreeShape
from outpace.llm import LLM
from outpace.policy.auto.acceptance import PRIOR, PRIOR_OF_LOOK_UPS, Acceptance
from outpace.policy.auto.controller import Auto
from outpace.policy.auto.growing import Growing
from outpace.policy.auto.ladder import Ladder
from outpace.policy.auto.ledger import CREDIT, SHARE, Ledger
from outpace.policy.auto.prices import DRAWN, PASS, Prices

CHAINS = Ladder.chains(10)


def prices(drafter: float) -> Prices:
    return Prices(level=drafter, node=0.04, started=0.1)


@dataclass
class Text:
    """A text of n tokens, written with a ledger under a chance of acceptance."""

    tokens: int
    drafter: float
    chance: Callable[[int], float]
    seed: int = 0
    ladder: Ladder = CHAINS
    spent: float = 0.0
    widths: list[int] = field(default_factory=list)

    def write(self) -> Text:
        dice, written, acceptance = random.Random(self.seed), 0, Acceptance()
        price, counts = prices(self.drafter), acceptance.new()
        ledger = Ledger(self.ladder, price, counts)
        while written < self.tokens:
            width = ledger.width(self.tokens - written)
            levels, accepted = self.ladder.levels[width], 0
            while accepted < levels and dice.random() < self.chance(written):
                accepted += 1
            emitted = min(accepted + 1, self.tokens - written)
            ledger.enter(width, levels, emitted)
            if levels:
                acceptance.learn(counts, self.trail(width, accepted))
            written += emitted
            self.spent += price.round(width, levels)
            self.widths.append(width)
        return self

    def trail(self, width: int, accepted: int) -> Trail:
        """The path of eldest children only."""
        shape = self.ladder.shape.first(width)
        return shape.trail([level[0] for level in shape.levels[:accepted]])


@pytest.mark.parametrize("chance", [0.0, 0.02, 0.05])
@pytest.mark.parametrize("drafter", [0.0, 0.02, 0.14, 0.4])
@pytest.mark.parametrize("seed", range(5))
def test_a_useless_drafter_is_hardly_asked_and_costs_what_was_granted(
    chance: float, drafter: float, seed: int
) -> None:
    text = Text(1000, drafter, lambda _: chance, seed).write()
    dearest = prices(drafter).round(10, 10) - 1
    assert text.spent - 1000 <= CREDIT + SHARE * text.spent + dearest
    assert text.spent / 1000 < 1.03
    assert sum(text.widths) / len(text.widths) < 0.4


@pytest.mark.parametrize("chance", [0.5, 0.75, 0.9])
@pytest.mark.parametrize("drafter", [0.0, 0.02, 0.14])
def test_a_good_drafter_keeps_its_length(chance: float, drafter: float) -> None:
    tokens = CHAINS.tokens([[chance]] * 10, room=10)
    best = max(tokens[width] / prices(drafter).round(width, width) for width in tokens)
    spent = sum(Text(1000, drafter, lambda _: chance, seed).write().spent for seed in range(12))
    assert 12 * 1000 / spent > 0.93 * best


def test_the_worst_case_is_bounded_too() -> None:
    """Everything is accepted until the ledger believes it, then nothing any more."""
    dearest = prices(0.14).round(10, 10) - 1
    for turn in (0, 1, 3, 10, 60, 300):
        text = Text(1500, 0.14, lambda written, turn=turn: float(written < turn)).write()
        assert text.spent - 1500 <= CREDIT + SHARE * text.spent + dearest


def test_a_drafter_that_gets_better_is_found_out() -> None:
    text = Text(1200, 0.14, lambda written: 0.9 if written > 400 else 0.0).write()
    assert sum(text.widths[300:400]) <= 15
    assert sum(text.widths[-60:]) / 60 > 2.5


def test_trees_are_cut_between_levels() -> None:
    ladder = Ladder.by_level(TreeShape.branching([3, 2, 1]))
    good = Text(300, 0.1, lambda _: 0.95, ladder=ladder).write()
    bad = Text(300, 0.1, lambda _: 0.0, ladder=ladder).write()
    assert set(good.widths) <= set(ladder.widths)
    assert max(good.widths) == 15
    assert sum(bad.widths) / len(bad.widths) < 0.3


def test_no_draft_reaches_beyond_the_text() -> None:
    ledger = Ledger(CHAINS, Prices(), Acceptance().new())
    assert ledger.width(1) == 0
    assert ledger.width(2) == 1


SEEDED = [
    SamplingParams(temperature=1.0, max_tokens=48, seed=3),
    SamplingParams(temperature=0.7, top_k=20, max_tokens=31, seed=4),
    SamplingParams(temperature=1.0, max_tokens=40),  # goes by the clock
    SamplingParams(temperature=0, max_tokens=25),
]


def grown() -> LLM:
    """With trees that are grown, at prices at which they fork."""
    config = {"method": "draft_tree", "model": llama(2, noise=0.03)}
    llm = LLM(llama(2), speculative_config=config)
    cheap = Prices(level=0.3, node=0.02)
    llm.engine.controller = Auto(Growing(cheap), prices=cheap)
    return llm


@pytest.mark.parametrize("method", [*CONFIGS, "grown"])
def test_a_seeded_text_is_the_same_in_any_batch_and_at_any_speed(method: str) -> None:
    llm = grown() if method == "grown" else LLM(llama(2), speculative_config=CONFIGS[method])
    assert isinstance(llm.engine.controller, Auto)
    alone = [llm.generate([PROMPTS[i]], SEEDED[i])[0] for i in (0, 1)]
    assert len({output.metrics.num_draft_tokens > 0 for output in alone}) == 1
    for order in ([0, 1, 2, 3], [3, 1, 2, 0]):
        outputs = llm.generate([PROMPTS[i] for i in order], [SEEDED[i] for i in order])
        texts = dict(zip(order, outputs, strict=True))
        for i in (0, 1):
            assert texts[i].token_ids == alone[i].token_ids
            assert texts[i].metrics.num_draft_tokens == alone[i].metrics.num_draft_tokens
    if method == "grown":
        assert max(output.metrics.num_draft_tokens for output in alone) > 0
        assert not llm.engine.controller._static.shape.is_chain


def test_the_price_of_a_drafter_is_its_weights_over_the_targets() -> None:
    target, small = llama(4), llama(1)
    weights = [
        sum(w.nbytes for name, w in model.named_parameters() if "embed_tokens" not in name)
        for model in (small, target)
    ]
    for config, level in (
        ({"method": "draft_model", "model": small}, (weights[0] + DRAWN) / (weights[1] + PASS)),
        ({"method": "ngram"}, 0.0),
    ):
        controller = LLM(target, speculative_config=config).engine.controller
        assert isinstance(controller, Auto)
        assert controller._prices.level == level


def test_look_ups_are_trusted_less_than_models_at_first() -> None:
    guesses = []
    for config in ({"method": "draft_model", "model": llama(1)}, {"method": "ngram"}):
        controller = LLM(llama(4), speculative_config=config).engine.controller
        assert isinstance(controller, Auto)
        guesses.append(controller.acceptance.new().chances(2)[0][0])
        assert guesses[-1] == controller.acceptance.typical(2)[0][0]
    assert guesses == [PRIOR, PRIOR_OF_LOOK_UPS]


def test_other_work_weighs_on_small_models_only() -> None:
    small, large = (Prices.nominal(size // 10, size, "cpu") for size in (10**7, 10**10))
    assert small.round(4, 4) > 1.2 * large.round(4, 4)
    assert large.round(4, 4) == pytest.approx(1 + 4 * (0.1 + large.node), rel=0.01)
    assert large.round(4, 2) < large.round(4, 4)
    assert small.round(4, 3) - small.round(4, 4) == pytest.approx(small.forked - small.level)
    assert small.round(0, 0) == large.round(0, 0) == 1
    assert Prices.nominal(1, 10, "cuda").node < small.node
