"""Heads whose columns ride in the target's pass: what they observe, and when."""

from __future__ import annotations

import random
from typing import Any, Literal

import pytest
import torch

from devices import on_device
from engine.test_interruptions import FAULTS, Stops
from outpace import LLM, SamplingParams
from outpace.core.faults import RowFault
from outpace.core.proposal import AuxTokens
from outpace.core.request import Request
from outpace.draft.base import Round, Rows
from outpace.draft.registry import find_drafter
from outpace.errors import ConfigError, UnsupportedModel
from outpace.methods.heads.aux_tokens import AuxHeadDrafter
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.partial.aux_tokens import AuxForward
from outpace.train.teacher import Teacher
from targets.families import CONTEXT, PROMPTS, build, target
from targets.generating import greedy, ids

METHODS = ["pass", "hidden_transfer"]
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=9, ignore_eos=True)


def decoder(method: str, model: Any, compile: bool | Literal["auto"] = "auto", **more: Any) -> LLM:
    options = find_drafter(method).dummy_options(LoadedModel(model, None, "a model"))
    config = {"method": method, "num_speculative_tokens": 4, **options, **more}
    limits = {"max_num_seqs": 4, "max_model_len": CONTEXT}
    return LLM(model, speculative_config=config, compile=compile, **limits)


def play(llm: LLM) -> None:
    while llm.engine.has_unfinished_requests:
        llm.engine.step()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mistral", "bloom", "falcon-alibi"])
def test_guesses_are_what_the_columns_say_in_a_plain_pass(
    method: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains and trees, ragged rows and rows that end; windows are measured in positions."""
    model, checked = target(family), 0
    llm = decoder(method, model)
    head = llm.engine.drafter.head
    teacher, begin = Teacher(LoadedModel(model, None, family), ()), AuxHeadDrafter.draft_steps

    def draft_steps(self: AuxHeadDrafter, rows: Rows) -> object:
        nonlocal checked
        for row in range(len(rows)):
            if self.can_draft(rows, row):
                before = on_device([rows.since(row, 0)[:-1]])
                length = before.shape[1]
                with torch.no_grad():
                    aux_tokens = head.aux_tokens(on_device([length - 1]), length, 1)
                    said = teacher.forward_aux(before, aux_tokens)[0]
                # The norms of some models compute in float32.
                assert torch.allclose(self._found(rows, row), said, atol=1e-5)
                checked += 1
        return begin(self, rows)

    monkeypatch.setattr(AuxHeadDrafter, "draft_steps", draft_steps)
    params = [SAMPLED, greedy(5), greedy(12), SAMPLED]
    llm.generate(PROMPTS, params)
    assert checked > 12


@pytest.mark.parametrize("family", ["llama", "bloom", "falcon-alibi"])
def test_texts_that_are_read_together_are_read_as_each_is_alone(family: str) -> None:
    model = target(family)
    teacher = Teacher(LoadedModel(model, None, family), ())
    head = decoder("pass", model).engine.drafter.head
    texts = on_device([[1, 2, 3, 4], [9, 8, 7, 6], [5, 5, 2, 1]])
    aux_tokens = head.aux_tokens(on_device([1, 3]), 4, 1)
    together = head.aux_tokens(on_device([1, 3]), 4, len(texts))
    with torch.no_grad():
        found = teacher.forward_aux(texts, together)
        alone = [teacher.forward_aux(text[None], aux_tokens)[0] for text in texts]
    assert torch.allclose(found, torch.stack(alone), atol=1e-5)


def added(llm: LLM, asked: list[SamplingParams]) -> list[Request]:
    pairs = zip(PROMPTS, asked, strict=True)
    requests = [llm.input_processor.requests(prompt, params)[0] for prompt, params in pairs]
    for request in requests:
        llm.engine.add(request)
    return requests


@pytest.mark.parametrize("method", METHODS)
def test_a_stop_at_any_operation_costs_no_text(method: str) -> None:
    # A recorded pass is one operation, and cannot be stopped within.
    llm, asked = decoder(method, target("llama"), compile=False), [SAMPLED, greedy(6)] * 2
    expected = ids(llm.generate(PROMPTS, asked))
    counting = Stops(0, KeyboardInterrupt)
    with counting:
        llm.generate(PROMPTS, asked)
    choose = random.Random(3)
    for number in range(15):
        played = added(llm, asked)
        fault = FAULTS[number % len(FAULTS)]
        with pytest.raises(fault), Stops(choose.randrange(1, -counting.left), fault):
            play(llm)
        play(llm)
        assert [request.output_ids for request in played] == expected


@pytest.mark.parametrize("method", METHODS)
def test_guesses_that_an_interruption_has_cost_are_computed_anew(method: str) -> None:
    """The texts have the tokens of a round, and the drafter has not seen it."""
    llm, asked = decoder(method, target("llama")), [SAMPLED, greedy(6)] * 2
    expected = ids(llm.generate(PROMPTS, asked))
    drafter, carried = llm.engine.drafter, list[int]()
    forward_aux, observe = llm.engine.target.forward_aux, drafter.observe

    def noted(text: list[int], aux_tokens: AuxTokens) -> torch.Tensor:
        carried.append(len(text))
        return forward_aux(text, aux_tokens)

    llm.engine.target.forward_aux = noted  # type: ignore[method-assign]
    for number in range(1, 5):
        rounds = iter(range(1, 1000))

        def interrupted(round: Round, number: int = number, rounds: Any = rounds) -> None:
            if next(rounds) == number:
                raise KeyboardInterrupt
            observe(round)

        drafter.observe = interrupted
        played = added(llm, asked)
        with pytest.raises(KeyboardInterrupt):
            play(llm)
        play(llm)
        assert [request.output_ids for request in played] == expected
    assert carried


@pytest.mark.parametrize("number", range(1, 6))
@pytest.mark.parametrize("method", METHODS)
def test_a_round_that_comes_to_nothing_leaves_no_guesses(method: str, number: int) -> None:
    """Another text ends in the middle of a round, whose columns nobody reads, and the round that is
    played in its place is interrupted."""
    llm, asked = decoder(method, target("llama")), [SAMPLED, greedy(6), SAMPLED, greedy(9)]
    expected = ids(llm.generate(PROMPTS, asked))
    drafter = llm.engine.drafter
    propose, observe = drafter.propose, drafter.observe
    rounds = iter(range(1, 1000))
    failed: list[Request] = []
    interrupted: list[Round] = []

    def fail(rows: Rows, budgets: Any) -> Any:
        made = propose(rows, budgets)
        if next(rounds) == number:
            failed.append(rows.requests[1])
            raise RowFault(1, "no token is left")
        return made

    def interrupt(round: Round) -> None:
        if failed and not interrupted:
            interrupted.append(round)
            raise KeyboardInterrupt
        observe(round)

    drafter.propose, drafter.observe = fail, interrupt
    played = added(llm, asked)
    with pytest.raises(KeyboardInterrupt):
        play(llm)
    play(llm)
    for request, text in zip(played, expected, strict=True):
        assert request.output_ids == text or request in failed


def test_a_round_without_columns_leaves_no_guesses() -> None:
    """Rows that draft nothing for a round begin anew, in whatever company they are."""
    llm = decoder("pass", target("llama"))
    drafter, seen = llm.engine.drafter, []
    inner = drafter.observe

    def observe(round: Round) -> None:
        inner(round)
        seen.append([drafter._guesses[request] is not None for request in round.requests])

    drafter.observe = observe
    off = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, speculative="off")
    llm.generate(PROMPTS[:2], [greedy(6), off])
    assert any(first for first, *_ in seen)
    assert not any(second for _, *others in seen for second in others)


def test_a_target_without_gradients_is_not_trained_for() -> None:
    teacher = Teacher(LoadedModel(target("llama"), None, "blocks"), ())
    aux_tokens = AuxTokens(
        on_device([[0]]), embeddings=on_device([[[0.0] * 32]], dtype=torch.float64)
    )
    with pytest.raises(UnsupportedModel, match="blocks computes with code that no gradient"):
        teacher.forward_aux(on_device([[1, 2, 3]]), aux_tokens)


def test_a_target_with_a_recurrent_state_carries_no_columns() -> None:
    model = build("llama")
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(UnsupportedModel, match="keeps a recurrent state"):
        AuxForward(model, CONTEXT)


@pytest.mark.parametrize("method", [*METHODS, "diffusion", "ctc"])
def test_heads_that_learn_from_whole_texts_do_not_learn_online(method: str) -> None:
    with pytest.raises(ConfigError, match="does not learn from single corrections"):
        decoder(method, target("llama"), online={})
