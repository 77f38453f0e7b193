"""One thread plays the rounds: what one job does disturbs no other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from outpace import LLM, SamplingParams
from outpace.core.request import EncoderInputs
from outpace.draft.round import Outcome
from outpace.serve.engine_thread import Delta, EngineThread, Job, OutOfTime, QueueFull, ShuttingDown
from outpace.serve.observers import ServerMetrics, Tracer

from .conftest import wait_for


class Listener:
    """Collects what a job delivers."""

    def __init__(
        self, llm: LLM, prompt: str = "One day", seconds: float = 60, **options: Any
    ) -> None:
        params = {"max_tokens": 20, "temperature": 0, **options}
        self.deltas: list[Delta] = []
        self.done = threading.Event()
        self.job = Job(llm.requests(prompt, params, streaming=True), self._take, seconds)

    def _take(self, deltas: list[Delta]) -> None:
        self.deltas += deltas
        if sum(delta.finish_reason is not None for delta in self.deltas) == len(self.job.requests):
            self.done.set()

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    def ended(self) -> Delta:
        assert self.done.wait(30)
        return self.deltas[-1]


@pytest.fixture
def thread(llm: LLM) -> Iterator[EngineThread]:
    made = EngineThread(llm.engine, max_waiting=4)
    made.start()
    yield made
    made.close(0)
    llm.engine.step()
    assert not llm.engine.has_unfinished_requests
    assert not llm.engine.running


def test_deltas_are_the_text(llm: LLM, thread: EngineThread) -> None:
    one = Listener(llm)
    thread.submit(one.job)
    assert one.ended().finish_reason == "length"
    assert len(one.deltas) > 1
    assert sum(len(delta.tokens) for delta in one.deltas) == 20
    assert one.job.arrived <= one.job.began <= one.job.first_token <= one.job.ended
    assert one.text == one.job.requests[0].text


def test_tokens_that_came_first_are_no_part_of_the_time_between_tokens(llm: LLM) -> None:
    requests = llm.requests("One day", {"max_tokens": 20})
    requests[0].output_ids[:] = range(11)
    job = Job(requests, lambda deltas: None, 60, arrived=0.0, first_token=1.0, ended=2.0)
    job.first_counts = [6]
    metrics = ServerMetrics("tiny", lambda: 0, lambda: 0, 1)
    metrics.observe_job(job)
    told = 'outpace:inter_token_latency_seconds_sum{model_name="tiny"} 0.2'
    assert told in metrics.exposition().decode()


def test_the_source_of_an_encoder_counts_as_a_prompt(llm: LLM) -> None:
    (request,) = llm.requests("One", {"max_tokens": 2})
    read = len(request.prompt_ids) + 40
    request.source, request.admitted_token_ids = EncoderInputs([1] * 40), [0]
    metrics = ServerMetrics("tiny", lambda: 0, lambda: 0, 1)
    metrics.observe_job(Job([request], lambda deltas: None, 60, arrived=0.0, ended=2.0))
    counted = metrics.exposition().decode()
    assert f'outpace:prompt_tokens_total{{model_name="tiny"}} {read}.0' in counted
    assert f'outpace:request_prompt_tokens_sum{{model_name="tiny"}} {read}.0' in counted


def test_what_a_round_counts(llm: LLM) -> None:
    def outcome(drafted: int, accepted: int, emitted: int) -> Outcome:
        return Outcome(drafted, drafted, accepted=accepted, emitted=emitted, tokens=[])

    metrics = ServerMetrics("tiny", lambda: 0, lambda: 0, 1)
    rounds = [[(0, 0, 1), (3, 2, 3)], [(4, 0, 1), (3, 1, 2), (2, 2, 2)], [(0, 0, 1)]]
    for each in rounds:
        metrics.observe_round(SimpleNamespace(outcomes=[outcome(*one) for one in each]))  # type: ignore[arg-type]
    lines = metrics.exposition().decode().splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if line.startswith("outpace:"))
    counted = {
        "generation_tokens_total": 10,
        "spec_decode_num_drafts_total": 4,
        "spec_decode_num_draft_tokens_total": 12,
        "spec_decode_num_accepted_tokens_total": 5,
    }
    for name, count in counted.items():
        assert float(found[f'outpace:{name}{{model_name="tiny"}}']) == count
    by_depth = "outpace:spec_decode_num_accepted_tokens_per_pos_total"
    depths = [f'{by_depth}{{model_name="tiny",position="{at}"}}' for at in range(3)]
    assert [found.get(one) for one in depths] == ["3.0", "2.0", None]


def test_what_was_learned_is_written_when_nobody_waits(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the last text of a batch, and when it has been delivered; and in the end."""
    jobs: list[Listener] = []
    settled: list[list[bool]] = []
    monkeypatch.setattr(
        llm.engine, "flush", lambda: settled.append([one.done.is_set() for one in jobs])
    )
    made = EngineThread(llm.engine, max_waiting=4)
    jobs += [Listener(llm, max_tokens=count) for count in (4, 30)]
    made.start()
    for one in reversed(jobs):
        made.submit(one.job)
    jobs[1].ended()
    wait_for(lambda: settled and all(settled[-1]))
    jobs.append(Listener(llm, max_tokens=400, ignore_eos=True))
    made.submit(jobs[2].job)
    wait_for(lambda: jobs[2].deltas)
    before = len(settled)
    made.close(0)
    assert settled[before:]
    assert all(map(all, settled[before:]))
    assert [True, False] not in [one[:2] for one in settled]


def test_a_cancelled_job_gives_its_row_back_within_a_round(llm: LLM, thread: EngineThread) -> None:
    endless = Listener(llm, max_tokens=400, ignore_eos=True)
    thread.submit(endless.job)
    wait_for(lambda: endless.deltas)
    rounds: list[int] = []
    with llm.engine.observing(lambda trace: rounds.append(len(trace.requests))):
        thread.cancel(endless.job)
        seen = len(rounds)
        wait_for(lambda: thread.running == 0)
    assert len(rounds) - seen <= 2  # the one that was being played, and one that had begun
    assert endless.ended().finish_reason == "abort"
    after = Listener(llm)
    thread.submit(after.job)
    assert after.ended().finish_reason == "length"


def test_more_than_may_wait_are_refused(llm: LLM, thread: EngineThread) -> None:
    room = llm.engine.target.max_rows + 4
    jobs = [Listener(llm, max_tokens=200, ignore_eos=True) for _ in range(room)]
    for one in jobs:
        thread.submit(one.job)
    with pytest.raises(QueueFull):
        thread.submit(Listener(llm).job)
    wait_for(lambda: thread.running == llm.engine.target.max_rows)
    assert thread.waiting == 4
    for one in jobs:
        thread.cancel(one.job)
    for one in jobs:
        one.ended()
    again = Listener(llm)
    thread.submit(again.job)
    assert again.ended().finish_reason == "length"


def test_a_job_that_waits_is_left_alone_and_keeps_its_time(llm: LLM, thread: EngineThread) -> None:
    rows = llm.engine.target.max_rows
    params: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, "speculative": "off"}
    jobs = [Listener(llm, **params) for _ in range(rows)]
    for one in jobs:
        thread.submit(one.job)
    wait_for(lambda: thread.running == rows)
    looked: list[int] = []
    late, left = Listener(llm, seconds=0.05), Listener(llm)
    for one in (late, left):
        request = one.job.requests[0]
        text = request.new_text
        request.new_text = lambda text=text: (looked.append(1), text())[1]  # type: ignore[method-assign,misc]
        thread.submit(one.job)
    assert isinstance(late.ended().error, OutOfTime)
    assert late.job.ended - late.job.arrived >= 0.05
    thread.cancel(left.job)
    assert left.ended().finish_reason == "abort"
    assert left.job.ended - left.job.arrived > 0
    assert len(looked) == 2, "nobody asks for the text of one that waits"
    assert late.job.began is left.job.began is None
    for one in jobs:
        thread.cancel(one.job)
        one.ended()


def test_time_is_limited(llm: LLM, thread: EngineThread) -> None:
    late = Listener(llm, seconds=0.05, max_tokens=400, ignore_eos=True)
    thread.submit(late.job)
    assert isinstance(late.ended().error, OutOfTime)


def test_a_client_that_raises_disturbs_nobody(llm: LLM, thread: EngineThread) -> None:
    def gone(deltas: list[Delta]) -> None:
        raise RuntimeError("the loop is closed")

    bad = Listener(llm)
    broken = Job(bad.job.requests, gone, 60)
    good = Listener(llm)
    thread.submit(broken)
    thread.submit(good.job)
    assert good.ended().finish_reason == "length"
    wait_for(lambda: thread.running == 0)


def test_a_request_that_faults_ends_alone(llm: LLM, thread: EngineThread) -> None:
    def fails(ids: Any, scores: Any) -> Any:
        if ids.shape[1] > 6:
            raise ValueError("no")
        return scores

    alone = Listener(llm)
    thread.submit(alone.job)
    alone.ended()
    bad, good = Listener(llm, logits_processors=[fails]), Listener(llm)
    thread.submit(bad.job)
    thread.submit(good.job)
    assert "raised ValueError" in str(bad.ended().error)
    assert good.ended().finish_reason == "length"
    assert good.text == alone.text


@pytest.mark.parametrize("failures", [1, 2])
def test_a_round_that_fails_is_played_again(
    llm: LLM, thread: EngineThread, failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, score = [failures], llm.engine.target.score

    def failing(plan: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise MemoryError("none left")
        return score(plan)

    monkeypatch.setattr(llm.engine.target, "score", failing)
    one = Listener(llm)
    thread.submit(one.job)
    if failures == 1:
        assert one.ended().finish_reason == "length"
    else:
        assert isinstance(one.ended().error, MemoryError)
    after = Listener(llm)
    thread.submit(after.job)
    assert after.ended().finish_reason == "length"


class Panic(BaseException):
    """What a library in Rust raises: no ``Exception``, and no wish to end the program."""


def test_a_panic_ends_no_more_than_its_round(
    llm: LLM, thread: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(llm.engine, "step", lambda: (_ for _ in ()).throw(Panic("no")))
        one = Listener(llm)
        thread.submit(one.job)
        assert str(one.ended().error) == "Panic: no"
    after = Listener(llm)
    thread.submit(after.job)
    assert after.ended().finish_reason == "length"


def test_a_text_that_panics_when_it_is_told_ends_alone(llm: LLM, thread: EngineThread) -> None:
    def panics() -> str:
        raise Panic("no")

    bad, good = Listener(llm), Listener(llm)
    bad.job.requests[0].new_text = panics  # type: ignore[method-assign]
    thread.submit(bad.job)
    thread.submit(good.job)
    assert str(bad.ended().error) == "Panic: no"
    assert good.ended().finish_reason == "length"


def test_what_is_handed_over_while_the_server_closes_is_told(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = EngineThread(llm.engine, max_waiting=4)
    late, end_all = Listener(llm), made.end_all

    def after_the_last_look() -> None:
        end_all()
        made._accepts = True  # as it was when a handler of requests looked
        made.submit(late.job)

    monkeypatch.setattr(made, "end_all", after_the_last_look)
    made.start()
    made.close(0)
    assert isinstance(late.ended().error, ShuttingDown)
    llm.engine.step()


def test_closing_lets_open_jobs_end(llm: LLM) -> None:
    made = EngineThread(llm.engine, max_waiting=4)
    made.start()
    jobs = [Listener(llm, max_tokens=30, ignore_eos=True) for _ in range(3)]
    for one in jobs:
        made.submit(one.job)
    assert made.close(30)
    assert [one.ended().finish_reason for one in jobs] == ["length"] * 3
    with pytest.raises(ShuttingDown):
        made.submit(Listener(llm).job)
    assert not made.alive


def test_closing_ends_what_takes_too_long(llm: LLM) -> None:
    made = EngineThread(llm.engine, max_waiting=4)
    made.start()
    endless = Listener(llm, max_tokens=480, ignore_eos=True)
    made.submit(endless.job)
    wait_for(lambda: endless.deltas)
    assert not made.close(0)
    assert isinstance(endless.ended().error, ShuttingDown)
    llm.engine.step()


def test_a_trace_that_cannot_be_written_ends_no_text(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    def decode(token: int) -> str:
        raise RuntimeError("no such token")

    asked = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (expected,) = llm.generate("Once upon a time", asked)
    tracer = Tracer(decode)
    requests = llm.requests("Once upon a time", asked)
    tracer.follow(requests)
    with llm.engine.observing(tracer):
        llm.engine.add(requests[0])
        while llm.engine.has_unfinished_requests:
            llm.engine.step()
    assert requests[0].output_ids == expected.token_ids
    assert tracer.take(requests[0]) == []
    assert [record.message for record in caplog.records] == [
        "a round could not be written down, and the trace of its text ends"
    ]
