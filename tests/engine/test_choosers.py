"""Drafters that choose a child for each row: by what it would have done, by tag, by task."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lab.options.walk import audit_options

from outpace import LLM, SamplingParams
from outpace.audit.letters import LetterTokenizer, letter_model
from outpace.audit.model import AuditPlan, audit_model
from outpace.draft.base import Round, Rows
from outpace.draft.registry import find_drafter
from outpace.draft.state import StateFile
from outpace.errors import ConfigError
from outpace.methods.choosers.classifier import TaskClassifier
from outpace.methods.choosers.learned.hedge_state import (
    AT_FIRST,
    LEAST,
    MOST,
    Allowance,
    HedgeState,
    Shadow,
)
from outpace.methods.choosers.learned.ucb import Bandit, UcbOptions
from outpace.methods.heads.aux_tokens import AuxHeadDrafter
from outpace.methods.models.noisy_copy import noisy_copy
from outpace.targets.hf.loading.loaded import LoadedModel
from targets.families import CONTEXT, PROMPTS, plain, target
from targets.generating import greedy, ids

from .test_routes import FAR, LENGTH, NEAR, NGRAM, SAMPLED

EXPECTED = plain("llama", LENGTH, tuple(map(tuple, PROMPTS)))


def decoder(**config: Any) -> LLM:
    given = {"num_speculative_tokens": 4, **config}
    return LLM(target("llama"), speculative_config=given, max_num_seqs=4, max_model_len=CONTEXT)


# -- hedge: learns about all -----------------------------------------------------------------------


@pytest.mark.slow
def test_hedge_keeps_every_option_in_batches_with_dead_ends() -> None:
    """What a row learns depends neither on what its neighbours chose nor on how they ended."""
    report = audit_options(["hedge"], ["token"])
    assert [cell for cell in report.cells if cell.state == "BROKEN"] == []


def test_the_leader_follows_a_stream_that_switches_task() -> None:
    """In every segment of 900 tokens it comes to 95 % of the best drafter there."""
    depth, dice = 4, random.Random(0)
    leader, shadows = HedgeState([1.2] * 3, memory=0.97), [Shadow(depth) for _ in range(3)]
    segments = [[0.9, 0.4, 0.3], [0.3, 0.85, 0.5], [0.4, 0.3, 0.9], [0.9, 0.4, 0.3]] * 2
    for chances in segments:
        rates = [sum(chance**k for k in range(depth + 1)) for chance in chances]
        rounds = 0.0
        for _ in range(900):
            rounds += 1 / rates[leader.best]
            # What is measured at one token is noisy, as overlaps of distributions are.
            noisy = [min(1.0, max(0.0, dice.gauss(c, 0.2))) for c in chances]
            learn(leader, shadows, noisy)
        assert 900 / rounds > 0.95 * max(rates), (chances, rounds)


def learn(leader: HedgeState, shadows: list[Shadow], chances: list[float]) -> None:
    pairs = zip(shadows, chances, strict=True)
    leader.learn([[shadow.ended(chance)] for shadow, chance in pairs], 1)


def rounds_alone(said: list[bool], depth: int) -> int:
    """Plays a drafter whose guess of each token is right or not."""
    rounds = at = 0
    while at < len(said):
        accepted = 0
        while accepted < depth and at < len(said) and said[at]:
            accepted, at = accepted + 1, at + 1
        at, rounds = at + 1, rounds + 1
    return rounds


@given(said=st.lists(st.booleans(), max_size=40), depth=st.integers(1, 6))
def test_a_shadow_plays_the_rounds_that_its_drafter_would_have_played(
    said: list[bool], depth: int
) -> None:
    shadow = Shadow(depth)
    ended = sum(shadow.ended(float(right)) for right in said)
    unfinished = shadow.begun[0] < 1
    assert ended + unfinished == rounds_alone(said, depth)


def test_a_drafter_of_a_few_lucky_places_does_not_lead() -> None:
    """Half of the text comes in runs of which it says all, and there it wins; over the whole text
    it does not, though the mean of what its drafts bring over all places is higher."""
    leader = HedgeState([1.0, 1.0], memory=0.995)
    shadows = [Shadow(4), Shadow(4)]
    for place in range(2000):
        lucky = place % 20 < 10
        learn(leader, shadows, [0.7, float(lucky)])
    steady = sum(0.7**k for k in range(5))
    assert leader.gains[0] == pytest.approx(steady, rel=0.02)
    assert leader.gains[1] == pytest.approx(20 / 12, rel=0.03)  # 2 rounds in a run, 10 after it
    assert leader.best == 0


def test_a_cheaper_drafter_leads_where_it_brings_as_much() -> None:
    leader, shadows = HedgeState([1.0, 2.0], memory=0.97), [Shadow(2), Shadow(2)]
    for _ in range(400):
        learn(leader, shadows, [0.5, 0.9])
    assert leader.gains == pytest.approx([1.75, 2.71 / 2], rel=1e-3)
    assert leader.best == 0


def test_what_is_observed_now_and_then_stands_for_what_was_not() -> None:
    """Asked in one of four rounds, a drafter is known as well as one that is always asked."""
    leader = HedgeState([1.0, 1.0], memory=0.97)
    for round in range(40):
        said = [0.25, 0.75]
        leader.learn([said, said if round % 4 == 3 else None], 2)
    assert leader.gains[1] == pytest.approx(leader.gains[0], rel=0.02)
    assert leader.gains[0] == pytest.approx(2.0, rel=0.2)


@pytest.mark.parametrize("memory", [0.5, 0.97])
def test_one_round_is_not_all_that_is_known_after_a_long_silence(memory: float) -> None:
    leader = HedgeState([1.0, 2.0], memory)
    for _ in range(30_000):
        leader.learn([[0.5], None], 1)
    assert leader.best == 0
    leader.learn([[0.5], [0.0]], 1)  # a single token that it would have said
    for _ in range(300):
        leader.learn([[0.5], [0.0]], 1)  # and only such ones
    assert all(0 < gain <= MOST * 1.01 for gain in leader.gains)
    leader.gains = [float("inf"), float("nan")]
    assert leader.gains == [pytest.approx(MOST), pytest.approx(LEAST)]


def test_an_allowance_is_never_overspent() -> None:
    allowance, spent = Allowance(0.04, AT_FIRST), 0.0
    for round in range(500):
        allowance.earned += 1.5
        asked = [allowance.hold(0.7) for _ in range(3)]  # three rows at once
        if round % 5:  # one round in five comes to nothing
            for _ in filter(None, asked):
                allowance.pay(0.7)
                spent += 0.7
        allowance.held = 0.0
        assert spent <= AT_FIRST + 0.04 * allowance.earned
    assert spent == pytest.approx(allowance.spent)
    assert spent > AT_FIRST + 0.9 * 0.04 * allowance.earned


def test_what_asking_costs_stays_below_its_share_in_a_batch() -> None:
    """Rows that are asked about at once share an allowance, and only their prompts are read."""
    llm = decoder(method="hedge", drafters=[NGRAM, NEAR], every=1)
    drafter: Any = llm.engine.drafter
    drafter._best = lambda request, length: 0
    probs_of, read = drafter.children[1].probs_of, []

    def watched(rows: Rows, tokens: torch.Tensor, wanted: Any) -> Any:
        found = probs_of(rows, tokens, wanted)
        told = [False] * len(wanted) if found is None else found.abs().sum((1, 2)).bool().tolist()
        assert all(asked or not said for asked, said in zip(wanted, told, strict=True))
        read.extend(filter(None, wanted))
        return found

    drafter.children[1].probs_of = watched
    llm.generate(PROMPTS * 3, greedy(LENGTH))
    assert read
    assert drafter.spent <= AT_FIRST + 0.01 * drafter._allowance.earned


def test_hedge_does_not_ask_what_learns_from_others_about_a_seeded_row() -> None:
    learner = {**NEAR, "online": {"every": 1}}
    llm = decoder(method="hedge", drafters=[NGRAM, learner], every=1, asking=1.0)
    drafter: Any = llm.engine.drafter
    asked: list[int] = []
    probs_of = drafter.children[1].probs_of
    drafter.children[1].probs_of = lambda *given: asked.append(1) or probs_of(*given)
    llm.generate([PROMPTS[1]], SAMPLED)
    assert not asked
    llm.generate([PROMPTS[1]], greedy(LENGTH))
    assert asked


def test_hedge_learns_of_a_head_that_does_not_draft() -> None:
    """A head cannot say its distributions of given tokens: it drafts beside the one that was
    chosen."""
    llm = decoder(method="hedge", drafters=[NGRAM, dummy_options("medusa")], asking=1.0, every=1)
    drafter: Any = llm.engine.drafter
    drafter._best = lambda request, length: 0  # the look-up drafts, whatever is learned
    observed: list[int] = []
    learn = drafter.learned.learn

    def listen(ended: Any, count: int) -> None:
        observed.append(0 if ended[1] is None else len(ended[1]))
        learn(ended, count)

    drafter.learned.learn = listen
    methods: list[str] = []
    with llm.engine.observing(lambda trace: methods.extend(one.method for one in trace.outcomes)):
        assert ids(llm.generate(PROMPTS, greedy(LENGTH))) == EXPECTED
    assert set(methods) <= {"ngram", "hedge"}
    assert sum(map(bool, observed)) > len(observed) / 2
    assert drafter.gains["medusa"] != 1 / drafter.learned.costs[1]
    assert drafter.spent > 0


def test_the_first_drafter_begins() -> None:
    leader = HedgeState([1.2, 1.0], memory=0.97)
    leader.learn([[1 / 1.3], [1.0]], 1)
    assert leader.best == 0


def test_hedge_has_a_model_read_a_text_only_where_it_is_repaid() -> None:
    """The model is a little better than the look-up: it reads a short prompt, and no long one."""
    for prompt, who in (([5, 6, 7], "draft_model"), ([5, 6, 7, 8] * 12, "ngram")):
        llm = decoder(method="hedge", drafters=[NGRAM, NEAR])
        drafter: Any = llm.engine.drafter
        drafter._shares[1] = 4.0
        drafter.restore({"gains": [1.0, 1.03], "best": [1]})
        drafter.learned.learn = lambda ended, count: None  # nothing is learned in between
        rounds: list[Round] = []
        with llm.engine.observing(rounds.append):
            llm.generate([prompt], greedy(8))
        methods = {one.method for each in rounds for one in each.outcomes}
        assert methods - {"hedge"} == {who}  # at the end of a text nobody drafts


def test_what_asking_costs_stays_below_its_share() -> None:
    """The better model is found by distributions, and asking took no more than was allowed."""
    llm = decoder(method="hedge", drafters=[NGRAM, NEAR], asking=0.1, every=1)
    drafter: Any = llm.engine.drafter
    asked: list[int] = []
    probs_of = drafter.children[1].probs_of

    def watched(rows: Rows, tokens: torch.Tensor, wanted: Any) -> Any:
        asked.append(tokens.shape[1])
        return probs_of(rows, tokens, wanted)

    drafter.children[1].probs_of = watched
    drafter.learned.learn = lambda ended, count: None  # the look-up leads for good
    for prompt in PROMPTS:
        llm.generate([prompt], greedy(LENGTH))
    allowance = drafter._allowance
    assert 0 < len(asked) <= allowance.spent  # a pass of this model costs one of the target
    assert allowance.spent <= AT_FIRST + 0.1 * allowance.earned


def test_hedge_knows_what_a_look_up_would_have_brought_alone() -> None:
    """Another one drafts, and still the shadow of the look-up plays the rounds that it plays."""
    prompt = [[5, 6, 7, 8, 9] * 5]
    alone: Any = decoder(**NGRAM).generate(prompt, greedy(40))[0].metrics
    llm = decoder(method="hedge", drafters=[NEAR, NGRAM], memory=0.5)
    drafter: Any = llm.engine.drafter
    ended: list[float] = []
    drafter.learned.learn = lambda rounds, count: ended.extend(rounds[1])  # nobody takes over
    llm.generate(prompt, greedy(40))
    assert sum(ended) == pytest.approx(alone.num_target_passes, abs=2)


def test_hedge_drafts_with_the_better_model_and_finds_it_by_distributions() -> None:
    llm = decoder(method="hedge", drafters=[FAR, NEAR], asking=0.2)
    assert ids(llm.generate(PROMPTS, greedy(LENGTH))) == EXPECTED
    methods = []
    with llm.engine.observing(lambda trace: methods.append(trace.proposal.methods[:1])):
        llm.generate([PROMPTS[0]], SamplingParams(temperature=1.0, max_tokens=40))
    gains = llm.engine.drafter.gains  # type: ignore[attr-defined]
    assert gains["draft_model 2"] > gains["draft_model 1"]
    assert [who for who in methods if who][-2:] == [("draft_model 2",)] * 2


def dummy_options(method: str) -> dict[str, Any]:
    """A tiny drafter of this method."""
    options = find_drafter(method).dummy_options(LoadedModel(target("llama"), None, "llama"))
    return {"method": method, **options}


@pytest.mark.parametrize("speculative", ["off", None])
def test_nothing_is_learned_of_columns_that_did_not_ride(speculative: Any) -> None:
    """They had no occasion to say anything, which is not to bring nothing."""
    llm = decoder(method="hedge", drafters=[NGRAM, dummy_options("pass")])
    drafter: Any = llm.engine.drafter
    first = 1.6 if speculative is None else 1.1  # of the look-up: who leads
    drafter.restore({"gains": [first, 1.2], "best": [speculative is not None]})
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, speculative=speculative)
    llm.generate([[5, 6, 7, 8, 9] * 5], params)
    assert drafter.gains["pass"] == pytest.approx(1.2)


@pytest.mark.parametrize("method", ["hedge", "ensemble"])
@pytest.mark.parametrize("other", ["lookahead", "hidden_transfer"])
def test_a_drafter_is_not_shown_the_columns_of_another_one(
    method: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ask for columns; those of one ride."""
    shown: list[bool] = []
    new_guesses = AuxHeadDrafter._new_guesses

    def noted(self: AuxHeadDrafter, round: Round, *rest: Any) -> Any:
        aux_tokens = round.proposal.aux_tokens
        shown.append(aux_tokens is not None and aux_tokens.entry_layer == self.head.entry_layer)
        return new_guesses(self, round, *rest)

    monkeypatch.setattr(AuxHeadDrafter, "_new_guesses", noted)
    llm = decoder(method=method, drafters=[dummy_options("pass"), dummy_options(other)])
    assert ids(llm.generate(PROMPTS, greedy(LENGTH))) == EXPECTED
    assert all(shown)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_seeded_row_learns_the_same_beside_columns_that_ride(seed: int) -> None:
    llm = decoder(method="hedge", drafters=[NGRAM, {"method": "lookahead"}])
    drafter: Any = llm.engine.drafter
    params = SamplingParams(temperature=0.4, seed=seed, max_tokens=30, ignore_eos=True)
    asked, learned = [5, 6, 7] * 4, []

    def note(trace: Any) -> None:
        found = [request for request in trace.requests if request.prompt_ids == asked]
        learned.extend(drafter._learned[request].gains for request in found)

    with llm.engine.observing(note):
        llm.generate([asked], params)
        alone = list(learned)
        learned.clear()
        llm.generate([asked, PROMPTS[0]], [params, greedy(40)])
    assert learned == alone


def test_what_is_observed_of_one_row_does_not_depend_on_others() -> None:
    """A model whose context one row has nearly filled has distributions for the other row only."""
    short = noisy_copy(target("llama"), 0.2)
    short.config.max_position_embeddings = 48
    llm = decoder(model=LoadedModel(short, None, "short", same_tokens=True))
    drafter: Any = llm.engine.drafter
    seen = []

    def listen(round: Round) -> None:
        rows = round.rows
        tokens = torch.zeros(len(rows), 3, dtype=torch.long)
        probs = drafter.probs_of(rows, tokens)
        told = [False] * len(rows) if probs is None else probs.sum((1, 2)).tolist()
        seen.append([bool(each) for each in told])

    drafter.observe = listen
    llm.generate([list(range(3, 24)), [4, 5]], greedy(3, speculative="off"))
    assert seen[0] == [False, True]


@pytest.mark.parametrize("head", [False, True])
def test_a_seeded_row_has_a_leader_of_its_own(head: bool) -> None:
    drafters = [NGRAM, dummy_options("medusa")] if head else [FAR, NEAR, NGRAM]
    llm = decoder(method="hedge", drafters=drafters, asking=0.3)
    first = ids(llm.generate([PROMPTS[1]], SAMPLED))
    llm.generate(PROMPTS * 2, SamplingParams(temperature=1.0, max_tokens=30))
    assert ids(llm.generate([PROMPTS[1]], SAMPLED)) == first
    assert ids(llm.generate(PROMPTS[:3], SAMPLED))[1:2] == first


@pytest.mark.parametrize("head", ["pass", "hidden_transfer"])
@pytest.mark.parametrize("method", ["tagged", "ensemble", "hedge"])
def test_a_seeded_row_does_not_draft_by_columns_that_others_could_take_away(
    method: str, head: str
) -> None:
    """Columns ride while all rows are one child's, which a row cannot know alone."""
    riding, near = dummy_options(head), {"method": "suffix"}
    config = {"routes": {"a": riding}} if method == "tagged" else {"drafters": [riding, near]}
    llm = decoder(method=method, **config)
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=24, ignore_eos=True, tag="a")
    alone = ids(llm.generate([[5, 6, 7]], params))
    again = ids(llm.generate([[5, 6, 7], PROMPTS[0]], [params, greedy(24)]))
    assert again[:1] == alone
    assert ids(llm.generate(PROMPTS, greedy(LENGTH, tag="a"))) == EXPECTED


def test_what_a_model_would_have_drawn_from_is_what_it_draws_from() -> None:
    llm = decoder(**NEAR)
    drafter: Any = llm.engine.drafter
    seen = []
    propose = drafter.propose

    def watched(rows: Any, budgets: Any) -> Any:
        made = propose(rows, budgets)
        probs = drafter.probs_of(rows, made.tokens)
        off = (probs - made.distribution.q).abs().amax(-1)
        seen.append(float(off[made.valid].max()))
        again = propose(rows, budgets)
        assert torch.equal(again.tokens[made.valid], made.tokens[made.valid])
        return again

    drafter.propose = watched
    llm.generate(PROMPTS, SAMPLED)
    assert len(seen) > 3
    assert max(seen) < 1e-9


@pytest.mark.parametrize("method", ["hedge", "ucb"])
def test_sampled_texts_follow_the_distribution(method: str) -> None:
    near, far = ({"model": noisy_copy(letter_model(), noise)} for noise in (0.5, 1.5))
    llm = LLM(
        letter_model(),
        tokenizer=LetterTokenizer(),
        speculative_config={
            "method": method, "drafters": [far, near, NGRAM], "num_speculative_tokens": 3
        },
        max_num_seqs=40,
        generation_config="none",
    )  # fmt: skip
    plan = AuditPlan([[1, 2, 3], [5, 6, 5, 6]], samples=120, tokens=6, power=False)
    report = audit_model(llm, plan, SamplingParams(temperature=1.0))
    assert report.ok, report


# -- ucb: a bandit ---------------------------------------------------------------------------------


def test_a_bandit_pulls_the_best_arm_most() -> None:
    bandit, dice = Bandit(3, exploration=0.1), random.Random(1)
    for _ in range(500):
        arm = bandit.choice
        bandit.add(arm, min(1.0, max(0.0, dice.gauss([0.3, 0.8, 0.5][arm], 0.2))))
    assert bandit.pulls[1] > 450
    assert min(bandit.pulls) >= 1


def test_ucb_plays_each_drafter_and_then_the_better_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same draws each time, since unlucky first ones may mislead it for long."""
    monkeypatch.setattr("outpace.input_processor.secrets.randbits", random.Random(1).getrandbits)
    llm = decoder(method="ucb", drafters=[FAR, NEAR])
    llm.generate(PROMPTS * 4, SamplingParams(temperature=1.0, max_tokens=30))
    pulls = llm.engine.drafter.pulls  # type: ignore[attr-defined]
    assert min(pulls.values()) >= 1
    assert pulls["draft_model 2"] > pulls["draft_model 1"]


def test_ucb_counts_no_row_in_which_nobody_was_to_draft() -> None:
    llm = decoder(method="ucb", drafters=[NEAR, NGRAM])
    asked = [greedy(30), *[greedy(30, speculative="off")] * 2]
    rounds = []
    with llm.engine.observing(lambda trace: rounds.append(bool(trace.budgets[0]))):
        llm.generate(PROMPTS[:3], asked)
    pulls = llm.engine.drafter.pulls  # type: ignore[attr-defined]
    assert sum(pulls.values()) == sum(rounds)


# -- state between runs ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["hedge", "ucb"])
def test_what_was_learned_is_kept_and_another_ones_refused(method: str, tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    config = {"method": method, "drafters": [FAR, NEAR], "state": str(path)}
    llm = decoder(**config)
    llm.generate(PROMPTS, SamplingParams(temperature=1.0, max_tokens=20))
    kept = json.loads(path.read_text())
    assert kept["method"] == method
    again: Any = decoder(**config).engine.drafter
    shared = again.learned
    values = shared.gains if method == "hedge" else shared.sums
    assert values == pytest.approx(kept["state"]["gains" if method == "hedge" else "sums"])
    assert max(values) > 0
    renamed = {"model": LoadedModel(NEAR["model"], None, "another", same_tokens=True)}
    for wrong, words in (
        ({"drafters": [NEAR, NGRAM]}, "name another file"),
        ({"drafters": [FAR, renamed]}, "draft_model 2 of another"),
        ({"state": 5}, "must be the name of a file"),
        ({"state": str(tmp_path / "no" / "file")}, "no folder"),
    ):
        with pytest.raises(ConfigError, match=words):
            decoder(**{**config, **wrong})
    path.write_text(json.dumps({**kept, "state": []}))
    with pytest.raises(ConfigError, match=rf"is no state of method {method!r} .* remove the file"):
        decoder(**config)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="not what a choice among drafters has learned"):
        decoder(**config)


@pytest.mark.parametrize("method", ["hedge", "ucb", "auto"])
def test_what_was_learned_of_one_target_or_head_is_not_another_ones(
    method: str, tmp_path: Path
) -> None:
    """A Medusa head has no norms to tell it by."""
    medusa = find_drafter("medusa").dummy_options(LoadedModel(target("llama"), None, "llama"))[
        "model"
    ]
    other = noisy_copy(medusa, 0.01)
    config: dict[str, Any] = {"state": str(tmp_path / "state.json"), "method": method}

    def with_head(head: Any, model: Any) -> LLM:
        one = {"method": "medusa", "model": head}
        several = {"drafter": one} if method == "auto" else {"drafters": [one, NGRAM]}
        limits = {"max_num_seqs": 4, "max_model_len": CONTEXT}
        return LLM(model, speculative_config={**config, **several}, **limits)

    with_head(medusa, target("llama")).generate(PROMPTS, greedy(4))
    with_head(medusa, target("llama"))
    tuned: Any = copy.deepcopy(target("llama"))
    tuned.model.norm.weight.data.mul_(1.1)
    for head, model in ((other, target("llama")), (medusa, tuned)):
        with pytest.raises(ConfigError, match="another target or other draft models"):
            with_head(head, model)


def test_auto_keeps_what_it_has_learned(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    config = {"method": "auto", **NEAR, "num_speculative_tokens": "auto", "state": str(path)}
    decoder(**config).generate(PROMPTS, SamplingParams(temperature=0, max_tokens=20))
    kept = json.loads(path.read_text())
    assert kept["drafters"] == ["suffix", f"draft_model of {kept['drafters'][1][15:]}"]
    again: Any = decoder(**config).engine.controller
    assert json.loads(json.dumps(again.to_dict())) == kept["state"]
    for wrong, words in (
        ({"lookups": [NGRAM]}, "name another file"),
        ({"state": 5}, "must be the name of a file"),
        ({"model": None}, "one look-up drafts alone: give 'model' or 'drafter'"),
        ({"num_speculative_tokens": 3}, "with num_speculative_tokens nothing is chosen so"),
    ):
        with pytest.raises(ConfigError, match=words):
            decoder(**{**config, **wrong})
    path.write_text(json.dumps({**kept, "models": ["of another target", kept["models"][1]]}))
    with pytest.raises(ConfigError, match="another target or other draft models, whatever"):
        decoder(**config)
    state = kept["state"]
    for broken in (
        {},
        {**state, "savings": {"draft_model": {"all": ["x", 1.0]}}},
        {**state, "savings": {"draft_model": {"all": [1.0]}}},
        {**state, "drafters": {}},
    ):
        path.write_text(json.dumps({**kept, "state": broken}))
        with pytest.raises(ConfigError, match=r"is no state of method 'auto' .* remove the file"):
            decoder(**config)


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that write a state, one for each time."""
    save, names = StateFile.save, []

    def noting(self: StateFile, state: Any) -> None:
        names.append(threading.current_thread().name)
        save(self, state)

    monkeypatch.setattr(StateFile, "save", noting)
    return names


def written_in(path: Path) -> Any:
    """Returns what was learned and is kept in a file."""
    return json.loads(path.read_text())["state"]


def learned_by(llm: LLM) -> Any:
    """Returns what was learned, as it would be kept."""
    file = llm.engine.drafter.file
    assert file is not None
    return json.loads(json.dumps(file._state()))


@pytest.mark.parametrize("method", ["auto", "hedge", "ucb"])
def test_no_round_waits_for_a_state_to_be_written(
    method: str, tmp_path: Path, writers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    drafts = {**NEAR, "num_speculative_tokens": "auto"} if method == "auto" else {}
    config = {**drafts, "method": method, "state": str(path)}
    llm = decoder(**config, **({} if drafts else {"drafters": [FAR, NEAR]}))
    params = [SamplingParams(temperature=0, max_tokens=count) for count in (4, 8, 12, 24)]
    outputs = llm.generate_each(PROMPTS[:4], params)
    for _ in params[:-1]:
        next(outputs)
        assert writers == [], "a text has ended, and another one is being written"
    next(outputs)
    outputs.close()  # type: ignore[attr-defined]
    assert writers == ["MainThread"], "written once, when all of them have ended"
    assert method != "auto" or written_in(path) == learned_by(llm)
    llm.engine.flush()
    assert len(writers) == 1, "there is nothing new"
    monkeypatch.setattr("outpace.draft.state.SECONDS", 0.0)
    llm.generate(PROMPTS[:4], params)
    assert "outpace-state" in writers[1:], "on the way by a thread of its own"
    assert "MainThread" not in writers[1:-1]
    assert method != "auto" or written_in(path) == learned_by(llm)


def test_a_caller_that_is_interrupted_leaves_what_was_learned(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    config = {"method": "auto", **NEAR, "num_speculative_tokens": "auto", "state": str(path)}
    llm = decoder(**config)
    outputs = llm.generate_each(PROMPTS[:2], [greedy(4), greedy(90)])
    next(outputs)
    assert not path.exists()
    outputs.close()  # type: ignore[attr-defined]
    assert written_in(path) == learned_by(llm)


STEPS_BY_HAND = """
import sys
from outpace import LLM, SamplingParams
from outpace.llm import BUNDLED
drafter = {"method": "auto", "model": str(BUNDLED / "drafter"), "state": sys.argv[1]}
llm = LLM(speculative_config=drafter)
for request in llm.requests("Once", SamplingParams(temperature=0, max_tokens=4)):
    llm.engine.add(request)
while llm.engine.has_unfinished_requests:
    llm.engine.step()
"""


def test_a_program_that_ends_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    subprocess.run([sys.executable, "-c", STEPS_BY_HAND, str(path)], check=True, timeout=100)
    assert set(written_in(path)) == {"savings", "drafters"}


# -- tags and tasks --------------------------------------------------------------------------------


def who_drafts(llm: LLM, prompts: Any, params: Any) -> list[str]:
    """The drafter of each row in the first round that drafts."""
    seen: list[Any] = []
    with llm.engine.observing(lambda trace: seen.append(trace.proposal.methods)):
        llm.generate(prompts, params)
    return list(next(methods for methods in seen if methods))


def test_a_tag_names_the_drafter() -> None:
    llm = decoder(method="tagged", routes={"copying": NGRAM, "code": NEAR}, default=FAR)
    params = [SamplingParams(temperature=0, max_tokens=8, tag=tag) for tag in
              ("copying", "code", None, "poems")]  # fmt: skip
    names = who_drafts(llm, PROMPTS[:4], params)
    assert names == ["ngram", "draft_model 2", "draft_model 1", "draft_model 1"]
    assert ids(llm.generate(PROMPTS, greedy(LENGTH))) == EXPECTED


def test_an_interruption_leaves_no_tags_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = decoder(method="tagged", routes={"copying": NGRAM}, default=NEAR)
    params = [greedy(8, tag="copying"), greedy(8)]

    def interrupted(plan: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.target, "score", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[:2], params)
    assert who_drafts(llm, PROMPTS[:2], params[::-1]) == ["draft_model", "ngram"]


def test_a_part_of_the_target_drafts_for_one_row_of_several() -> None:
    """Once its row has ended, it is not asked any more."""
    part = {"method": "layer_skip", "layers": {"attention": [1]}}
    llm = decoder(method="tagged", routes={"part": part}, default=NGRAM)
    params = [greedy(LENGTH), greedy(5, tag="part")]
    found = ids(llm.generate(PROMPTS[:2], params))
    assert found == [EXPECTED[0], EXPECTED[1][:5]]


def test_without_a_default_others_are_decoded_plainly() -> None:
    llm = decoder(method="tagged", routes={"code": NEAR})
    outputs = llm.generate(PROMPTS, greedy(LENGTH))
    assert sum(output.metrics.num_draft_tokens for output in outputs) == 0
    assert ids(outputs) == EXPECTED


@pytest.mark.parametrize("router", [lambda prompt: 1 / 0, lambda prompt: None])
def test_a_router_that_fails_ends_its_request_only(router: Any) -> None:
    def routed(prompt: Any) -> Any:
        return ("copying", 1.0) if list(prompt) == PROMPTS[0] else router(prompt)

    llm = decoder(method="task", router=routed, routes={"copying": NGRAM}, default=NEAR)
    good, bad = (llm.requests(prompt, greedy(LENGTH))[0] for prompt in PROMPTS[:2])
    for one in (good, bad):
        llm.engine.add(one)
    while llm.engine.step():
        pass
    assert good.output_ids == EXPECTED[0]
    assert bad.finish_reason == "error"
    assert "the router of method 'task' failed" in str(bad.error)


SUMS = [f"what is {a} + {b} * {c}?" for a in range(2, 8) for b, c in ((3, 4), (7, 9))]
TALES = [f"tell me a tale of a {who} in the {where}" for who in ("fox", "king", "witch", "boy")
         for where in ("wood", "sea", "snow")]  # fmt: skip


def test_a_classifier_tells_tasks_apart_and_says_how_sure_it_is(tmp_path: Path) -> None:
    made = TaskClassifier.trained({"maths": SUMS, "tales": TALES})
    assert made.accuracy == 1.0
    task, chance = made.task_of("what is 12 + 99 * 3?")
    assert task == "maths"
    assert chance > 0.8
    assert max(made.chances("zzzz qqqq")) < made.task_of("tell me a tale of a fox")[1]
    made.save(tmp_path / "router.npz")
    kept = TaskClassifier.load(tmp_path / "router.npz")
    assert kept.tasks == made.tasks
    assert kept.task_of(SUMS[0])[1] == pytest.approx(made.task_of(SUMS[0])[1], abs=1e-5)
    whole = (tmp_path / "router.npz").read_bytes()
    part = len(whole) // 3
    spoiled = whole[:part] + bytes(part) + whole[2 * part :]
    for broken in (b"PK nothing", whole[:-100], whole[: len(whole) // 2], spoiled):
        (tmp_path / "other.npz").write_bytes(broken)
        with pytest.raises(ConfigError, match="is no router"):
            TaskClassifier.load(tmp_path / "other.npz")


class Words(LetterTokenizer):
    """Decodes a prompt to the text of a task: token 1 begins maths, all others tales."""

    def decode(self, ids: Any, **_: Any) -> str:
        first = [*ids, None][0]
        return {1: SUMS[0], 2: TALES[0]}.get(first, "zzzz qqqq xxxx")


def test_a_prompts_task_names_the_drafter(tmp_path: Path) -> None:
    path = tmp_path / "router.npz"
    TaskClassifier.trained({"maths": SUMS, "tales": TALES}).save(path)
    config = {
        "method": "task",
        "router": str(path),
        "routes": {"maths": NGRAM, "tales": {"model": noisy_copy(letter_model(), 0.3)}},
        "default": {"model": noisy_copy(letter_model(), 0.6)},
        "threshold": 0.7,
        "num_speculative_tokens": 3,
    }
    llm = LLM(letter_model(), tokenizer=Words(), speculative_config=config)
    prompts = [[1, 5, 1, 5], [2, 3, 4], [5, 6, 7], [5, 6, 7]]
    params = [SamplingParams(temperature=0, max_tokens=6, tag=tag) for tag in
              (None, None, None, "maths")]  # fmt: skip
    names = who_drafts(llm, prompts, params)
    assert names == ["ngram", "draft_model 2", "draft_model 1", "ngram"]
    for wrong, words in (
        ({"routes": {"code": NGRAM}}, "knows maths, tales"),
        ({"router": None}, "outpace tune router"),
        ({"router": str(tmp_path / "none")}, "there is no router"),
    ):
        with pytest.raises(ConfigError, match=words):
            LLM(letter_model(), tokenizer=Words(), speculative_config={**config, **wrong})


@pytest.mark.parametrize("method", ["tagged", "task"])
def test_a_mistake_in_a_route_names_the_method(method: str) -> None:
    router = {"router": lambda prompt: ("code", 1.0)} if method == "task" else {}
    wrong = {"code": {**NGRAM, "num_speculative_tokens": 3}}
    with pytest.raises(ConfigError, match=f"for one drafter of method {method!r}"):
        decoder(method=method, routes=wrong, **router)


def test_a_state_that_cannot_be_written_is_told_once_and_ends_no_text(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    file = StateFile(folder / "state.json", "hedge", ["ngram"])
    folder.rmdir()
    with pytest.warns(UserWarning, match=r"cannot write .*state.json \(No such file"):
        file.save({"gains": [1.0]})
    file.save({"gains": [2.0]})  # a second warning would be an error
    file.keep(lambda: {"gains": [3.0]})
    folder.mkdir()
    file.flush()
    assert file.load() == {"gains": [3.0]}, "what could not be written is written later"


@pytest.mark.parametrize("inside", ["[" * 100_000, '{"gains": [NaN]}', '{"gains": [1e999]}'])
def test_a_state_that_is_no_finite_json_is_refused(tmp_path: Path, inside: str) -> None:
    path = tmp_path / "state.json"
    whose = '"method": "hedge", "drafters": ["ngram"], "models": []'
    path.write_text(f'{{{whose}, "state": {inside}}}')
    with pytest.raises(ConfigError, match="not what a choice among drafters has learned"):
        StateFile(path, "hedge", ["ngram"]).load()


def test_a_state_whose_name_no_file_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name another file"):
        StateFile(tmp_path / ("x" * 300), "hedge", ["ngram"]).load()
    with pytest.raises(ConfigError, match="must be the name of a file"):
        UcbOptions(drafters=[{"method": "ngram"}] * 2, state="a\0b")


def test_a_state_that_is_stopped_while_it_is_written_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "state.json"
    path.write_text("the last one")
    monkeypatch.setattr("outpace.draft.state.os.replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        StateFile(path, "hedge", ["ngram"]).save({"gains": [1.0]})
    assert path.read_text() == "the last one"
    assert list(tmp_path.iterdir()) == [path]


def test_a_text_that_joins_again_is_not_classified_again() -> None:
    """By then it holds what was written, too, and might be told to be of another task."""
    asked: list[int] = []

    def by_length(prompt: Sequence[int]) -> tuple[str, float]:
        asked.append(len(prompt))
        return "long" if len(prompt) > 4 else "short", 1.0

    routes = {"long": NGRAM, "short": {"method": "suffix"}}
    llm = decoder(method="task", routes=routes, router=by_length)
    drafter: Any = llm.engine.drafter
    request, other = (llm.requests(prompt)[0] for prompt in ([5, 6], [5, 6, 7, 8, 9]))
    for written in ([], [7, 8, 9]):
        request.output_ids += written
        drafter.check(request)
        drafter.begin([request])
        assert drafter.names[drafter._routes[request]] == "suffix"
        drafter.end([request])
    request.recover()
    drafter.check(request)
    assert asked == [2]
    drafter.check(other)
    assert drafter.names[drafter._routes[other]] == "ngram"


@pytest.mark.parametrize("combine", ["merge", "vote"])
def test_what_learns_from_whole_chains_is_refused_where_drafts_are_joined(combine: str) -> None:
    config = {"drafters": [FAR, NEAR], "combine": combine}
    with pytest.raises(ConfigError, match="length='risk' learns from whole chains"):
        LLM(
            target("llama"),
            speculative_config={"method": "ensemble", "length": "risk", **config},
            max_model_len=CONTEXT,
        )
