"""A request whose own code or scores fail ends with its error, and no other does."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from torch import Tensor

from outpace import LLM, SamplingParams
from outpace.core.faults import NotFinite
from outpace.core.logits.dead_ends import DeadEnds
from outpace.core.logits_pipeline import RowOptions
from outpace.draft.base import Round
from outpace.engine.request import EngineRequest
from outpace.targets.base import ScoreInputs, Scores
from targets.families import drafter, target

PROMPTS = [[1, 2, 3], [4, 5], [6]]


def raises_late(ids: Tensor, scores: Tensor) -> Tensor:
    if ids.shape[1] >= 6:
        raise KeyError("too long")
    return scores


def gives_no_number(ids: Tensor, scores: Tensor) -> Tensor:
    return scores * math.nan


def treat_as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Distributions are treated as on another device, where every look waits for it."""
    make = DeadEnds.__init__
    monkeypatch.setattr(
        DeadEnds, "__init__", lambda ends, rows, vocabulary, _: make(ends, rows, vocabulary, False)
    )


@pytest.mark.parametrize("on_a_device", [False, True], ids=["cpu", "device"])
@pytest.mark.parametrize("method", ["none", "draft_model", "draft_tree", "itself"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("options", "length", "message"),
    [
        ({"logits_processors": [raises_late]}, 4, "'raises_late' raised KeyError: 'too long'"),
        ({"logits_processors": [gives_no_number]}, 0, "'gives_no_number' returned .* nan"),
    ],
    ids=["raises", "NaN"],
)
def test_it_ends_alone(
    method: str,
    temperature: float,
    options: dict[str, Any],
    length: int,
    message: str,
    on_a_device: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """itself: the target drafts for itself, so that drafts go on beyond the fault."""
    if on_a_device:
        treat_as_on_a_device(monkeypatch)
    config: dict[str, Any] = {"method": "draft_model" if method == "itself" else method}
    if method != "none":
        model = target("llama") if method == "itself" else drafter("llama")
        config |= {"model": model, "num_speculative_tokens": 3}
    if method == "draft_tree":
        config["branching"] = [2, 1]
    llm = LLM(target("llama"), speculative_config=config, max_num_seqs=3)
    fine = SamplingParams(temperature=temperature, seed=1, max_tokens=8, ignore_eos=True)
    expected = llm.generate(PROMPTS, fine)
    bad = SamplingParams(temperature=temperature, seed=1, max_tokens=8, ignore_eos=True, **options)
    found = llm.generate(PROMPTS, [fine, bad, fine])
    assert [output.finish_reason for output in found] == ["length", "error", "length"]
    account = found[1].metrics.account
    assert account is not None
    assert account.rounds == found[1].metrics.num_target_passes
    assert found[1].token_ids == expected[1].token_ids[:length]
    assert [found[row].token_ids for row in (0, 2)] == [expected[row].token_ids for row in (0, 2)]
    with pytest.raises(Exception, match=message):
        llm.generate(PROMPTS[1], bad)


@pytest.mark.parametrize("method", ["none", "ngram", "draft_model"])
def test_who_fails_in_the_first_round_leaves_others_that_wait_alone(method: str) -> None:
    """Prompts of one length are read by the pass of their first round. Where that came to nothing,
    a row that joins now has read its prompt, and the others have not."""
    config: dict[str, Any] = {"method": method}
    if method != "none":
        config["num_speculative_tokens"] = 2
    if method == "draft_model":
        config["model"] = drafter("llama")
    llm = LLM(target("llama"), speculative_config=config, max_num_seqs=2)
    fine = SamplingParams(temperature=1.0, seed=1, max_tokens=6, ignore_eos=True)
    bad = SamplingParams(temperature=1.0, max_tokens=6, logits_processors=[gives_no_number])
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [2, 4], [5, 3, 1]]
    alone = [llm.generate(prompt, fine)[0].token_ids for prompt in prompts]
    found = llm.generate(prompts, [bad, fine, fine, fine, fine])
    assert [output.finish_reason for output in found] == ["error", *["length"] * 4]
    assert [output.token_ids for output in found] == [[], *alone[1:]]


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("room", ["target", "drafter"])
def test_a_prompt_that_cannot_be_begun_ends_alone(
    room: str, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where memory runs out while one is admitted, before or after others."""
    config = {"method": "draft_model", "model": drafter("llama"), "num_speculative_tokens": 3}
    llm = LLM(target("llama"), speculative_config=config, max_num_seqs=3)
    fine = SamplingParams(temperature=1.0, seed=1, max_tokens=8, ignore_eos=True)
    expected = [output.token_ids for output in llm.generate(PROMPTS, fine)]
    begin = {"target": llm.engine.target.admit, "drafter": llm.engine.drafter.begin}[room]

    def admit(asked: Any) -> Any:
        prompt = asked.token_ids if room == "target" else asked[0].prompt_ids
        done = begin(asked)  # what it leaves behind is half a row
        if list(prompt) == PROMPTS[place]:
            raise RuntimeError("not enough memory")
        return done

    name = "admit" if room == "target" else "begin"
    monkeypatch.setattr(getattr(llm.engine, room), name, admit)
    found = llm.generate(PROMPTS, fine)
    for row, output in enumerate(found):
        assert output.finish_reason == ("error" if row == place else "length")
        assert output.token_ids == ([] if row == place else expected[row])
    assert not llm.engine.has_unfinished_requests


def test_a_drafter_that_fails_behind_a_round_leaves_the_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {"method": "draft_model", "model": drafter("llama"), "num_speculative_tokens": 3}
    llm = LLM(target("llama"), speculative_config=config, max_num_seqs=3)
    fine = SamplingParams(temperature=1.0, seed=1, max_tokens=8, ignore_eos=True)
    expected = [output.token_ids for output in llm.generate(PROMPTS, fine)]
    observe, rounds = llm.engine.drafter.observe, 0

    def fails_once(round: Any) -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 1:
            raise NotFinite(1, "the drafter's weights are damaged")
        observe(round)

    monkeypatch.setattr(llm.engine.drafter, "observe", fails_once)
    seen: list[Round] = []
    with llm.engine.observing(seen.append):
        found = llm.generate(PROMPTS, fine)
    assert [output.finish_reason for output in found] == ["length", "error", "length"]
    assert [found[row].token_ids for row in (0, 2)] == [expected[0], expected[2]]
    assert found[1].token_ids == expected[1][: len(found[1].token_ids)] != []
    written = [output.metrics.num_emitted_tokens for output in found]
    assert sum(one.emitted for each in seen for one in each.outcomes) == sum(written)
    assert written == [len(output.token_ids) for output in found]


def test_an_error_does_not_reach_a_text_that_has_ended() -> None:
    request = EngineRequest(
        [1], RowOptions(SamplingParams(temperature=0).resolve({})), seed=0, max_tokens=1
    )
    request.extend([2])
    request.fail(RuntimeError("too late"))
    assert (request.finish_reason, request.error) == ("length", None)


def test_who_leaves_while_waiting_leaves_the_queue() -> None:
    llm = LLM(target("llama"), speculative_config={"method": "none"}, max_num_seqs=1)
    asked = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    first, *waiting = [llm.requests(prompt, asked)[0] for prompt in PROMPTS]
    for request in (first, *waiting):
        llm.engine.add(request)
    llm.engine.step()
    llm.engine.remove(waiting[0])
    assert list(llm.engine.waiting) == waiting[1:]
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    assert len(llm.engine.waiting) == 0


@pytest.mark.parametrize("method", ["none", "draft_tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_device_is_looked_at_twice_only_where_some_score_is_no_number(
    method: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    look = DeadEnds._look
    treat_as_on_a_device(monkeypatch)
    monkeypatch.setattr(
        DeadEnds, "_look", lambda ends, *given: (looks.append(1), look(ends, *given))
    )
    config: dict[str, Any] = {"method": method}
    if method != "none":
        config |= {"model": drafter("llama"), "branching": [2, 1]}
    llm = LLM(target("llama"), speculative_config=config, max_num_seqs=3)
    fine = SamplingParams(temperature=temperature, seed=1, max_tokens=8, ignore_eos=True)
    expected = llm.generate(PROMPTS, fine)
    assert not looks
    score, rounds = llm.engine.target.score, itertools.count()

    def scores_no_number_late(inputs: ScoreInputs) -> Scores:
        scores = score(inputs)
        if next(rounds) == 2:
            scores.logits[1] = math.nan
        return scores

    monkeypatch.setattr(llm.engine.target, "score", scores_no_number_late)
    found = llm.generate(PROMPTS, fine)
    assert looks
    assert [output.finish_reason for output in found] == ["length", "error", "length"]
    own = found[1].token_ids
    assert 2 <= len(own) < 8
    assert own == expected[1].token_ids[: len(own)]
    assert [found[row].token_ids for row in (0, 2)] == [expected[row].token_ids for row in (0, 2)]
