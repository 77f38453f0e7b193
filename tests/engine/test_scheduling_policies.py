"""Orders that learn: fair to each client, or the shortest text first."""

from __future__ import annotations

import random
import sys
from collections import Counter
from dataclasses import replace
from threading import Thread

import numpy as np
import pytest
from lab.queueing import END, TOPICS, TextTimes, played, texts

from outpace import LLM
from outpace.core.logits_pipeline import RowOptions
from outpace.core.params import SamplingParams
from outpace.engine.lengths import ENOUGH, LengthEstimator
from outpace.engine.request import EngineRequest
from outpace.engine.scheduler import RequestQueue
from outpace.engine.scheduling_policies import (
    PATIENCE,
    FairPolicy,
    FCFSPolicy,
    SchedulingPolicy,
    ShortestFirstPolicy,
)
from targets.families import CONTEXT, PROMPTS, target
from targets.generating import greedy

ROWS = 8


def request(
    prompt: list[int] | None = None, client: str = "", limit: int = 1000, **options: object
) -> EngineRequest:
    params = SamplingParams(max_tokens=limit, **options).resolve({})
    made = EngineRequest(prompt or [5, 6, 7], RowOptions(params), 0, limit, eos_ids=(END,))
    made.client = client
    return made


def ended(one: EngineRequest, length: int) -> EngineRequest:
    one.extend([END + 1] * (length - 1) + [END])
    return one


# -- fair ------------------------------------------------------------------------------------------


def joins(queue: RequestQueue, count: int, length: int = 10) -> list[str]:
    """Lets the next requests join one by one, each of which is written at once."""
    found = []
    for _ in range(count):
        one = queue.first
        assert one is not None
        queue.join(one)
        queue.policy.on_round_end([ended(one, length)])
        found.append(str(one.client))
    return found


def queue_of(*clients: str) -> RequestQueue:
    queue = RequestQueue(FairPolicy())
    for number, client in enumerate(clients):
        one = request([1] * 10, client)
        one.id = number
        queue.add(one)
    return queue


def test_one_who_asks_much_does_not_keep_others_waiting() -> None:
    queue = queue_of(*["greedy"] * 20, "modest", "modest", "other")
    assert Counter(joins(queue, 6)) == {"greedy": 2, "modest": 2, "other": 1} | {"greedy": 3}
    assert joins(queue, 17) == ["greedy"] * 17


def test_rows_that_are_free_together_are_shared() -> None:
    queue = queue_of(*["a"] * 6, *["b"] * 6)
    taken = []
    for _ in range(6):
        one = queue.first
        assert one is not None
        queue.join(one)
        taken.append(one.client)
    assert Counter(taken) == {"a": 3, "b": 3}


def test_whoever_was_away_has_saved_up_nothing() -> None:
    queue = queue_of(*["busy"] * 30, "away")
    joins(queue, 21)
    for _ in range(10):
        queue.add(request([1] * 10, "away"))
    assert Counter(joins(queue, 8)) == {"busy": 4, "away": 4}


def test_long_texts_count_more_than_short_ones() -> None:
    queue = queue_of(*["long"] * 20, *["short"] * 20)
    given: Counter[str] = Counter()
    for _ in range(20):
        one = queue.first
        assert one is not None
        queue.join(one)
        length = 90 if one.client == "long" else 10
        queue.policy.on_round_end([ended(one, length)])
        given[str(one.client)] += 10 + 2 * length
    assert given["long"] == pytest.approx(given["short"], abs=200)


def test_clients_that_left_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.engine.scheduling_policies.REMEMBERED", 5)
    policy = FairPolicy()
    queue = RequestQueue(policy)
    for number in range(40):
        queue.add(request([1], str(number)))
        joins(queue, 1)
    assert len(policy._given) <= 6


def test_a_client_may_be_forgotten_while_its_last_text_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread ends it, and others come, before the round is over."""
    monkeypatch.setattr("outpace.engine.scheduling_policies.REMEMBERED", 1)
    policy = FairPolicy()
    first = request(client="first")
    policy.on_arrival(first)
    first.abort()
    for client in ("second", "third"):
        policy.on_arrival(request(client=client))
    policy.on_round_end([first])


def test_more_clients_may_wait_than_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.engine.scheduling_policies.REMEMBERED", 2)
    queue = queue_of(*"abcd")
    assert joins(queue, 4) == [*"abcd"]


# -- shortest --------------------------------------------------------------------------------------


def latencies(found: list[TextTimes]) -> np.ndarray:
    return np.array([one.latency for one in found])


def run(policy: SchedulingPolicy, load: float, seed: int) -> list[TextTimes]:
    return played(texts(1000, load, ROWS, seed), policy, ROWS)


@pytest.mark.parametrize("seed", range(2))
def test_under_load_the_mean_latency_falls(seed: int) -> None:
    first, shortest = (
        latencies(run(policy, 0.95, seed)) for policy in (FCFSPolicy(), ShortestFirstPolicy())
    )
    assert shortest.mean() < 0.85 * first.mean()
    assert np.median(shortest) < 0.6 * np.median(first)


def test_nobody_waits_for_ever() -> None:
    """Three rows' worth of work arrives for two: with the shortest alone, long texts would wait
    until nobody comes any more."""
    policy = ShortestFirstPolicy()
    coming = texts(1200, 1.5, ROWS, seed=4)
    predicted: dict[int, float] = {}
    arrives = policy.on_arrival

    def noting(one: EngineRequest) -> None:
        arrives(one)
        predicted[one.id] = policy._arrivals[one].predicted

    policy.on_arrival = noting  # type: ignore[method-assign]
    by_id = {one.request.id: one for one in coming}
    found = played(coming, policy, ROWS)
    assert len(found) == len(coming)
    joined = {text.request.id: at for text, at in _joined(found, coming)}
    for number, text in by_id.items():
        latest = text.arrives + PATIENCE * predicted[number]
        overtaken = [
            other
            for other, one in by_id.items()
            if one.arrives > latest + 1 and joined[other] < joined[number]
        ]
        assert not overtaken


def _joined(found: list[TextTimes], coming: list) -> list:  # type: ignore[type-arg]
    """Pairs texts with the round in which each got a row, by arrival and length."""
    left = {(one.arrived, one.length): one.joined for one in found}
    assert len(left) == len(coming), "choose a seed without twins"
    return [(text, left[text.arrives, text.length]) for text in coming]


def test_what_was_put_aside_is_sorted_by_what_is_left() -> None:
    policy = ShortestFirstPolicy()
    one = request(limit=100, ignore_eos=True)
    policy.on_arrival(one)
    assert policy.key(one) == (100.0,)
    one.extend([END + 1] * 60)
    assert policy.key(one) == (40.0,)


def test_the_engine_learns_from_its_texts() -> None:
    llm = LLM(target("llama"), max_model_len=CONTEXT, max_num_seqs=1, scheduling_policy="shortest")
    requests = [llm.requests(PROMPTS[0], greedy(length))[0] for length in (30, 3, 10)]
    for one in requests:
        llm.engine.add(one)
    lengths: list[int] = []
    while llm.engine.has_unfinished_requests:
        lengths += [len(one.output_ids) for one in llm.engine.step() if one.finished]
    assert lengths == [3, 10, 30]


# -- predicted lengths -----------------------------------------------------------------------------


def test_a_length_that_is_known_is_not_guessed() -> None:
    estimator = LengthEstimator()
    assert estimator.predict(request(limit=77, ignore_eos=True)) == 77
    for _ in range(50):
        estimator.learn(ended(request(limit=1000), 5))
    assert estimator.predict(request(limit=77, ignore_eos=True)) == 77
    assert estimator.predict(request(limit=3)) <= 3
    assert estimator.predict(request(limit=900, min_tokens=60)) >= 60


def test_words_of_the_prompt_tell_the_length() -> None:
    estimator, draws = LengthEstimator(), random.Random(1)

    def prompt(kind: int) -> list[int]:
        return [kind, *(draws.randrange(50, 900) for _ in range(12))]

    for _ in range(200):
        kind = draws.randrange(2)
        length = int(draws.lognormvariate(2 if kind else 5, 0.3)) + 1
        estimator.learn(ended(request(prompt(kind)), length))
    short = [estimator.predict(request(prompt(1))) for _ in range(20)]
    long = [estimator.predict(request(prompt(0))) for _ in range(20)]
    assert max(short) < min(long)
    assert np.median(short) == pytest.approx(np.exp(2), rel=0.7)
    assert np.median(long) == pytest.approx(np.exp(5), rel=0.5)


def test_the_fallback_is_the_usual_length() -> None:
    """Where nothing about a request tells its length, half of the texts are longer than predicted,
    and few texts suffice for the right order of magnitude."""
    estimator, draws = LengthEstimator(), random.Random(2)
    longer = []
    for number in range(600):
        one = request([draws.randrange(5000) for _ in range(8)])
        length = int(draws.lognormvariate(3, 0.5)) + 1
        if number == ENOUGH:
            assert estimator.predict(one) == pytest.approx(np.exp(3), rel=1.0)
        longer.append(length > estimator.predict(one))
        estimator.learn(ended(one, length))
    assert np.mean(longer[200:]) == pytest.approx(0.5, abs=0.12)


def test_texts_that_were_cut_off_count_as_at_least_as_long() -> None:
    estimator = LengthEstimator()
    for _ in range(100):
        estimator.learn(ended(request(), 100))
    for _ in range(100):
        cut = request()
        cut.extend([END + 1] * 10)
        cut.abort()
        estimator.learn(cut)
    assert estimator.predict(request()) == pytest.approx(100, rel=0.3)


def test_a_simulated_text_has_its_length() -> None:
    coming = texts(200, 0.5, ROWS, seed=3)
    assert all(len(one.request.prompt_ids) > 3 for one in coming)
    found = played(coming, FCFSPolicy(), ROWS)
    assert sorted(one.length for one in found) == sorted(one.length for one in coming)
    assert all(one.ended - one.joined == one.length for one in found)
    assert len(TOPICS) > 2
    assert replace(found[0], arrived=0).latency == found[0].ended


def test_requests_arrive_in_other_threads_while_one_plays() -> None:
    fair = FairPolicy()
    failures: list[RuntimeError] = []
    interval = sys.getswitchinterval()
    requests = [request(client=str(number % 50)) for number in range(3000)]

    def arrive(part: list[EngineRequest]) -> None:
        try:
            for one in part:
                fair.on_arrival(one)
        except RuntimeError as error:  # a dictionary that changed while it was looked through
            failures.append(error)

    sys.setswitchinterval(1e-6)
    try:
        threads = [Thread(target=arrive, args=(requests[at::4],)) for at in range(4)]
        for thread in threads:
            thread.start()
        for one in requests[::-1]:
            one.error = RuntimeError("it has ended")
            fair.on_round_end([one])
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures
