"""The order in which waiting requests join the batch."""

from __future__ import annotations

from collections.abc import Hashable

import pytest

from outpace import LLM
from outpace.engine.request import EngineRequest
from outpace.engine.scheduler import RequestQueue
from outpace.engine.scheduling_policies import (
    FairPolicy,
    FCFSPolicy,
    PriorityPolicy,
    SchedulingPolicy,
    ShortestFirstPolicy,
)
from targets.families import CONTEXT, PROMPTS, target
from targets.generating import greedy


def request(priority: float = 0) -> EngineRequest:
    llm = LLM(target("llama"), max_model_len=CONTEXT)
    return llm.requests(PROMPTS[0], greedy(3), priority=priority)[0]


def drained(queue: RequestQueue) -> list[EngineRequest]:
    found = []
    while (first := queue.first) is not None:
        found.append(first)
        queue.join(first)
    return found


def test_requests_join_as_they_come() -> None:
    queue, requests = RequestQueue(FCFSPolicy()), [request(priority) for priority in (2, 0, 1)]
    for one in requests:
        queue.add(one)
    assert len(queue) == 3
    assert drained(queue) == requests


def test_the_smallest_number_goes_first_and_equals_as_they_come() -> None:
    queue = RequestQueue(PriorityPolicy())
    requests = [request(priority) for priority in (1, 0, 1, -5, 0)]
    for one in requests:
        queue.add(one)
    assert drained(queue) == [requests[index] for index in (3, 1, 4, 0, 2)]


def test_texts_that_have_begun_go_before_all_others() -> None:
    queue = RequestQueue(PriorityPolicy())
    early, late, begun, other = (request(priority) for priority in (0, -9, 5, 6))
    queue.add(early)
    queue.put_back([begun, other])
    queue.add(late)
    assert drained(queue) == [begun, other, late, early]


def test_the_engine_goes_by_priority() -> None:
    llm = LLM(target("llama"), max_model_len=CONTEXT, max_num_seqs=1, scheduling_policy="priority")
    requests = [llm.requests(PROMPTS[0], greedy(4), priority=p)[0] for p in (3, 1, 2)]
    for one in requests:
        llm.engine.add(one)
    ended: list[float] = []
    while llm.engine.has_unfinished_requests:
        ended += [one.priority for one in llm.engine.step() if one.finished]
    assert ended == [1, 2, 3]


@pytest.mark.parametrize("policy", [FCFSPolicy, PriorityPolicy, FairPolicy, ShortestFirstPolicy])
def test_the_next_one_of_many_is_found_without_a_look_at_all(
    policy: type[SchedulingPolicy],
) -> None:
    sorted_: list[EngineRequest] = []

    class Counted(policy):  # type: ignore[misc, valid-type]
        def key(self, request: EngineRequest) -> tuple[float, ...]:
            sorted_.append(request)
            return super().key(request)  # type: ignore[no-any-return]

        def line_key(self, line: Hashable) -> tuple[float, ...]:
            sorted_.append(line)  # type: ignore[arg-type]
            return super().line_key(line)  # type: ignore[no-any-return]

    queue, llm = RequestQueue(Counted()), LLM(target("llama"), max_model_len=CONTEXT)
    for number in range(500):
        (one,) = llm.requests(PROMPTS[0], greedy(3))
        one.id, one.client = number, number % 3
        queue.add(one)
    sorted_.clear()
    for _ in range(100):
        first = queue.first
        assert first is not None
        queue.join(first)
        queue.policy.on_round_end([first])
    assert len(sorted_) <= 100 * 3
    assert len(queue) == 400
    left = list(queue)
    queue.put_back(left[:2])
    left[2].abort()
    queue.drop_finished()
    assert set(drained(queue)) == {*left} - {left[2]}


def test_who_arrives_while_another_leaves_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are added by other threads, at any time."""
    queue, leaves, late = RequestQueue(), request(), request()
    queue.add(leaves)

    def finished(one: EngineRequest) -> bool:
        if late not in list(queue):
            queue.add(late)
        return one is leaves

    monkeypatch.setattr(EngineRequest, "finished", property(finished))
    queue.drop_finished()
    assert list(queue) == [late]
