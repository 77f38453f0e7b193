"""The choice of how much to draft where no clock may decide."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from transformers import MixtralConfig, MixtralForCausalLM

from engine.test_auto import CONFIGS, PROMPTS, llama
from outpace.core.params import SamplingParams
from outpace.core.trees.tree_shape import TreeShape
from outpace.draft.round import Outcome
from outpace.llm import LLM
from outpace.policy.acceptance import PRIOR, PRIOR_OF_LOOK_UPS
from outpace.policy.auto import AutoController
from outpace.policy.candidate import Candidate
from outpace.policy.estimator import Estimator
from outpace.policy.exploration import INITIAL_CREDIT, TRIAL_SHARE, TrialBudget
from outpace.policy.nominal import PASS_OVERHEAD, NominalCosts
from outpace.policy.shapes import DraftSizes, GrownTrees
from outpace.targets.cpu.weights.experts import is_experts
from outpace.targets.hf.weights import experts_in

from .test_controller import alone, request

CHAINS = DraftSizes.chains(10)


def costs(drafter: float) -> NominalCosts:
    return NominalCosts(level=drafter, node=0.04, started=0.1)


@dataclass
class Text:
    """A text of n tokens, written by nominal costs under a chance of acceptance."""

    tokens: int
    drafter: float
    chance: Callable[[int], float]
    seed: int = 0
    drafts: DraftSizes = CHAINS
    spent: float = 0.0
    widths: list[int] = field(default_factory=list)

    def write(self) -> Text:
        dice, cost = random.Random(self.seed), costs(self.drafter)
        drafter = Candidate(Estimator("drafter", self.drafts, cost), TrialBudget())
        row = request(self.tokens)
        while not row.finished:
            written = len(row.output_ids)
            width = drafter.nominal(row)[0]
            levels, accepted = self.drafts.levels[width], 0
            while accepted < levels and dice.random() < self.chance(written):
                accepted += 1
            path = [level[0] for level in self.drafts.shape.levels[:accepted]]  # eldest children
            emitted = row.extend([2] * (accepted + 1))
            outcome = Outcome(width, levels, accepted, emitted, tuple(path))
            drafter.record(row, outcome, decided=False, asked=True)
            self.spent += cost.round(width, levels)
            self.widths.append(width)
        return self


@pytest.mark.parametrize("chance", [0.0, 0.02, 0.05])
@pytest.mark.parametrize("drafter", [0.0, 0.02, 0.14, 0.4])
@pytest.mark.parametrize("seed", range(5))
def test_a_useless_drafter_is_hardly_asked_and_costs_what_was_granted(
    chance: float, drafter: float, seed: int
) -> None:
    text = Text(1000, drafter, lambda _: chance, seed).write()
    dearest = costs(drafter).round(10, 10) - 1
    assert text.spent - 1000 <= INITIAL_CREDIT + TRIAL_SHARE * text.spent + dearest
    assert text.spent / 1000 < 1.03
    assert sum(text.widths) / len(text.widths) < 0.4


@pytest.mark.parametrize("chance", [0.5, 0.75, 0.9])
@pytest.mark.parametrize("drafter", [0.0, 0.02, 0.14])
def test_a_good_drafter_keeps_its_length(chance: float, drafter: float) -> None:
    tokens = CHAINS.tokens([[chance]] * 10, room=10)
    best = max(tokens[width] / costs(drafter).round(width, width) for width in tokens)
    spent = sum(Text(1000, drafter, lambda _: chance, seed).write().spent for seed in range(12))
    assert 12 * 1000 / spent > 0.93 * best


def test_the_worst_case_is_bounded_too() -> None:
    """Everything is accepted until it is believed, then nothing any more."""
    dearest = costs(0.14).round(10, 10) - 1
    for turn in (0, 1, 3, 10, 60, 300):
        text = Text(1500, 0.14, lambda written, turn=turn: float(written < turn)).write()
        assert text.spent - 1500 <= INITIAL_CREDIT + TRIAL_SHARE * text.spent + dearest


def test_a_drafter_that_gets_better_is_found_out() -> None:
    text = Text(1200, 0.14, lambda written: 0.9 if written > 400 else 0.0).write()
    assert sum(text.widths[300:400]) <= 15
    assert sum(text.widths[-60:]) / 60 > 2.5


def test_trees_are_cut_between_levels() -> None:
    ladder = DraftSizes.by_level(TreeShape.branching([3, 2, 1]))
    good = Text(300, 0.1, lambda _: 0.95, drafts=ladder).write()
    bad = Text(300, 0.1, lambda _: 0.0, drafts=ladder).write()
    assert set(good.widths) <= set(ladder.values)
    assert max(good.widths) == 15
    assert sum(bad.widths) / len(bad.widths) < 0.3


def test_no_draft_reaches_beyond_the_text() -> None:
    drafter = Candidate(Estimator("drafter", CHAINS), TrialBudget())
    assert drafter.nominal(request(1))[0] == 0
    assert drafter.nominal(request(2))[0] == 1


SEEDED = [
    SamplingParams(temperature=1.0, max_tokens=48, seed=3),
    SamplingParams(temperature=0.7, top_k=20, max_tokens=31, seed=4),
    SamplingParams(temperature=1.0, max_tokens=40),  # goes by the clock
    SamplingParams(temperature=0, max_tokens=25),
]


def drafter_of(llm: LLM) -> Estimator:
    """What its controller knows of the only drafter."""
    controller = llm.engine.controller
    assert isinstance(controller, AutoController)
    (drafter,) = controller._estimators
    return drafter


def grown() -> LLM:
    """With trees that are grown, at prices at which they fork."""
    config = {"method": "draft_tree", "model": llama(2, noise=0.03)}
    llm = LLM(llama(2), speculative_config=config)
    cheap = NominalCosts(level=0.3, node=0.02)
    llm.engine.controller = alone(GrownTrees(cheap), cheap)
    return llm


@pytest.mark.parametrize("method", [*CONFIGS, "grown"])
def test_a_seeded_text_is_the_same_in_any_batch_and_at_any_speed(method: str) -> None:
    llm = grown() if method == "grown" else LLM(llama(2), speculative_config=CONFIGS[method])
    assert isinstance(llm.engine.controller, AutoController)
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
        assert not drafter_of(llm).static.shape.is_chain


def test_a_drafter_costs_its_weights_over_the_targets() -> None:
    target, small = llama(4), llama(1)
    weights = [
        sum(w.nbytes for name, w in model.named_parameters() if "embed_tokens" not in name)
        for model in (small, target)
    ]
    drafting, scoring = (read + PASS_OVERHEAD for read in weights)
    for config, level in (
        ({"method": "draft_model", "model": small}, drafting / scoring),
        ({"method": "ngram"}, 0.0),
    ):
        drafter = drafter_of(LLM(target, speculative_config=config))
        assert drafter.nominal.level == level


def test_look_ups_are_trusted_less_than_models_at_first() -> None:
    guesses = []
    for config in ({"method": "draft_model", "model": llama(1)}, {"method": "ngram"}):
        acceptance = drafter_of(LLM(llama(4), speculative_config=config)).acceptance
        guesses.append(acceptance.new().chances(2)[0][0])
        assert guesses[-1] == acceptance.typical(2)[0][0]
    assert guesses == [PRIOR, PRIOR_OF_LOOK_UPS]


def test_other_work_weighs_on_small_models_only() -> None:
    small, large = (NominalCosts.of(size // 10, size, "cpu") for size in (10**7, 10**10))
    assert small.round(4, 4) > 1.2 * large.round(4, 4)
    assert large.round(4, 4) == pytest.approx(1 + 4 * (0.1 + large.node), rel=0.01)
    assert large.round(4, 2) < large.round(4, 4)
    assert small.round(4, 3) - small.round(4, 4) == pytest.approx(small.forked - small.level)
    assert small.round(0, 0) == large.round(0, 0) == 1
    assert NominalCosts.of(1, 10, "cuda").node < small.node


def test_tokens_read_experts_of_their_own() -> None:
    """Until all are read."""
    size = 10**10
    plain = NominalCosts.of(0, size, "cpu")
    mixed = NominalCosts.of(0, size, "cpu", experts=(0.5 * size, 1 / 16))
    more = [mixed.round(nodes, nodes) - plain.round(nodes, nodes) for nodes in (0, 1, 7, 1000)]
    assert more == pytest.approx([0, 0.5 * 15 / 16, 2.726, 0.5 * 15], rel=0.01)


def test_how_many_experts_a_token_chooses_is_the_models_to_say() -> None:
    """Those of Step 3.7 keep no configuration of their own."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 32, "num_hidden_layers": 2}
    config = MixtralConfig(
        **sizes, num_attention_heads=2, num_key_value_heads=1, num_local_experts=8
    )
    model = MixtralForCausalLM(config)
    known = experts_in(model)
    for module in model.modules():
        if is_experts(module):
            del module.config
    assert [each.chosen for each in known] == [2 / 8] * 2
    assert experts_in(model) == known
