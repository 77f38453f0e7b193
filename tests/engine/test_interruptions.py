"""Whatever stops a call half way, the same engine goes on, and no other text changes."""

from __future__ import annotations

import random
import threading
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from outpace import LLM, SamplingParams
from outpace.draft.round import Round
from outpace.engine.request import EngineRequest
from outpace.errors import ConfigError
from targets.families import CONTEXT, PROMPTS, drafter, target
from targets.generating import greedy, ids

from .texts import ids_of, text_decoder

LENGTH = 8
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=LENGTH, ignore_eos=True)
FAULTS = (KeyboardInterrupt, MemoryError, RuntimeError)


class Stops(TorchDispatchMode):
    """Raises a fault at the n-th operation on tensors."""

    def __init__(self, after: int, fault: type[BaseException]) -> None:
        super().__init__()
        self.left, self.fault = after, fault

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.fault("here")
        return func(*args, **(kwargs or {}))


def decoder(method: str, **more: Any) -> LLM:
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 4}
    if method != "ngram":
        config["model"] = drafter("llama")
    if method == "draft_tree":
        config["branching"] = [2, 1]
    options = {"max_num_seqs": 3, "max_model_len": CONTEXT, "max_num_batched_tokens": 6, **more}
    return LLM(target("llama"), speculative_config=config, **options)


@pytest.mark.parametrize("method", ["draft_model", "draft_tree", "ngram"])
def test_a_stop_at_any_operation_costs_no_text(method: str) -> None:
    llm, asked = decoder(method), [SAMPLED, greedy(LENGTH), SAMPLED, greedy(LENGTH)]
    expected = ids(llm.generate(PROMPTS, asked))
    counting = Stops(0, KeyboardInterrupt)
    with counting:
        llm.generate(PROMPTS, asked)
    operations, choose = -counting.left, random.Random(3)
    for number in range(20):
        fault = FAULTS[number % len(FAULTS)]
        with pytest.raises(fault), Stops(choose.randrange(1, operations), fault):
            llm.generate(PROMPTS, asked)
        assert not llm.engine.has_unfinished_requests
        assert ids(llm.generate(PROMPTS, asked)) == expected


def test_the_texts_of_other_calls_go_on() -> None:
    """One call is stopped while another one's text is in the same batch."""
    llm, choose = decoder("draft_model"), random.Random(4)
    expected = ids(llm.generate(PROMPTS[:1], SAMPLED))[0]
    for _ in range(12):
        stream = llm.stream(PROMPTS[0], SAMPLED)
        found = next(stream).token_ids
        with pytest.raises(KeyboardInterrupt), Stops(choose.randrange(1, 400), KeyboardInterrupt):
            llm.generate(PROMPTS[1:], greedy(CONTEXT - 20))
        for chunk in stream:
            found = [*found, *chunk.token_ids]
        assert found == expected


@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_threads_get_their_own_texts(method: str) -> None:
    llm = decoder(method, max_num_seqs=5)
    cases = [
        (prompt, SamplingParams(temperature=1.0, seed=seed, max_tokens=LENGTH, ignore_eos=True))
        for seed, prompt in enumerate([*PROMPTS, *PROMPTS])
    ]
    expected = [llm.generate([prompt], params)[0].token_ids for prompt, params in cases]
    wrong: list[object] = []

    def call(number: int) -> None:
        prompt, params = cases[number]
        try:
            for _ in range(8):
                found = llm.generate([prompt], params)[0].token_ids
                if found != expected[number]:
                    wrong.append((number, found))
        except BaseException as error:
            wrong.append((number, error))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not llm.engine.has_unfinished_requests


def test_threads_that_share_an_llm_take_turns() -> None:
    """A short text is ready for its caller as soon as it is written, and not when the long one of
    another thread is."""
    llm, done = text_decoder("none", k=0), threading.Event()
    played: list[int] = []  # by round, the thread

    def write_long_texts() -> None:
        params = SamplingParams(max_tokens=llm.max_model_len - 8, ignore_eos=True)
        while not done.is_set():
            llm.generate([[1, 2, 3]], params)

    def count(round: Round) -> None:
        played.append(threading.get_ident())

    with llm.engine.observing(count):
        other = threading.Thread(target=write_long_texts)
        other.start()
        try:
            for _ in range(3):
                text = list(llm.stream([4, 5], SamplingParams(max_tokens=40, ignore_eos=True)))
                assert sum(len(chunk.token_ids) for chunk in text) == 40
        finally:
            done.set()
            other.join()
    assert played.count(threading.get_ident()) > 30, "of 120, half of which the other one plays"


def test_a_call_from_inside_a_step_is_refused() -> None:
    llm = text_decoder("none", k=0)

    def asking(history: Any, scores: Any) -> Any:
        llm.generate("b", SamplingParams(max_tokens=1))
        return scores

    with pytest.raises(Exception, match="called the engine that is calling it") as raised:
        llm.generate("a", SamplingParams(max_tokens=2, logits_processors=[asking]))
    assert isinstance(raised.value, ConfigError) or isinstance(raised.value.__cause__, ConfigError)
    assert llm.generate("a", SamplingParams(max_tokens=2, temperature=0))


def test_an_error_in_the_reader_of_a_stream_leaves_the_engine_usable() -> None:
    llm = decoder("draft_model")
    expected = ids(llm.generate(PROMPTS, greedy(LENGTH)))

    def read() -> None:
        for _ in llm.stream(PROMPTS[0], greedy(LENGTH)):
            raise ValueError("the reader's own")

    with pytest.raises(ValueError, match="the reader's own"):
        read()
    assert not llm.engine.has_unfinished_requests
    assert ids(llm.generate(PROMPTS, greedy(LENGTH))) == expected


def test_a_stop_condition_that_raises_ends_its_own_text() -> None:
    llm = decoder("draft_model")
    expected = ids(llm.generate(PROMPTS, greedy(LENGTH)))
    requests = [llm.input_processor.requests(prompt, greedy(LENGTH))[0] for prompt in PROMPTS]

    def fails(tokens: list[int]) -> bool:
        if len(tokens) > len(PROMPTS[2]) + 3:
            raise ValueError("no more")
        return False

    requests[2].stop_when = fails
    for request in requests:
        llm.engine.add(request)
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    assert [request.finish_reason for request in requests] == [
        "length",
        "length",
        "error",
        "length",
    ]
    assert str(requests[2].error) == "no more"
    assert requests[2].output_ids == expected[2][:4]
    others = [request.output_ids for request in requests[:2] + requests[3:]]
    assert others == expected[:2] + expected[3:]


@pytest.mark.parametrize("sampled", [False, True])
def test_an_interrupted_token_has_its_logprobs_and_those_after_it_follow(sampled: bool) -> None:
    """A seeded text would be another one if accepted tokens were drawn again, at other places."""
    llm = decoder("draft_model")
    asked = replace(SAMPLED, logprobs=1) if sampled else greedy(LENGTH, logprobs=1)
    (request,), (whole,) = (llm.requests(PROMPTS[0], asked) for _ in range(2))
    faults = [KeyboardInterrupt, KeyboardInterrupt]

    def interrupted(tokens: list[int]) -> bool:
        if faults and len(tokens) > len(PROMPTS[0]) + 1:
            raise faults.pop()
        return False

    request.stop_when = interrupted
    for one in (request, whole):
        llm.engine.add(one)
    while llm.engine.has_unfinished_requests:
        with suppress(KeyboardInterrupt):
            llm.engine.step()
    assert not faults
    assert request.output_ids == whole.output_ids
    assert [list(each) for each in request.logprobs] == [list(each) for each in whole.logprobs]


def test_a_stream_loses_nothing_that_another_thread_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread's step may come while a piece of text is put together."""
    llm = text_decoder("none", k=0)
    params = SamplingParams(temperature=0, max_tokens=9)
    whole = llm.generate("a", params)[0].outputs[0]
    new_text = EngineRequest.new_text

    def meanwhile(request: EngineRequest) -> str:
        llm.engine.step()
        text = new_text(request)
        llm.engine.step()
        return text

    monkeypatch.setattr(EngineRequest, "new_text", meanwhile)
    chunks = list(llm.stream("a", params))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]


def test_an_interrupted_token_is_still_looked_at() -> None:
    """A stop string whose last token was appended when the interruption came ends the text."""
    llm = text_decoder("none", k=0)
    request = llm.input_processor.requests(
        "a", SamplingParams(max_tokens=9, stop="xy", temperature=0)
    )[0]
    request.extend(ids_of("x"))
    request.output_ids += ids_of("y")  # as an interruption leaves it
    request.finish_extend()
    whole = llm.input_processor.requests(
        "a", SamplingParams(max_tokens=9, stop="xy", temperature=0)
    )[0]
    whole.extend(ids_of("xy"))
    assert whole.finish_reason == "stop"
    assert (request.finish_reason, request.text) == (whole.finish_reason, whole.text)


def test_an_interrupted_length_policy_has_learned_from_all_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who is told of a round after the drafter would miss one where that is interrupted."""
    config: Any = {"model": drafter("llama"), "length": "heuristic"}
    llm = LLM(target("llama"), speculative_config=config, max_num_seqs=3, max_model_len=CONTEXT)
    expected = ids(llm.generate(PROMPTS[:2], SAMPLED))
    observe, rounds = llm.engine.drafter.observe, 0

    def interrupted(*given: Any) -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 2:
            raise KeyboardInterrupt
        observe(*given)

    monkeypatch.setattr(llm.engine.drafter, "observe", interrupted)
    requests = [one for prompt in PROMPTS[:2] for one in llm.requests(prompt, SAMPLED)]
    for one in requests:
        llm.engine.add(one)
    stopped = 0
    while llm.engine.has_unfinished_requests:
        try:
            llm.engine.step()
        except KeyboardInterrupt:
            stopped += 1
    assert stopped == 1
    assert [one.output_ids for one in requests] == expected
