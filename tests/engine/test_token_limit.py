"""Where all rows together may hold n tokens only, some are put aside, and no text changes."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from outpace import LLM, SamplingParams
from outpace.draft.base import Round
from outpace.draft.registry import find_drafter
from outpace.engine.request import EngineRequest
from outpace.engine.scheduler import HEADROOM, RequestQueue, TokenLimit
from outpace.errors import ConfigError
from targets.families import CONTEXT, PROMPTS, drafter, target
from targets.generating import greedy

NGRAM = {"method": "ngram", "prompt_lookup_min": 1}
LIMIT = 300
LENGTH = 90
SAMPLED = SamplingParams(temperature=1.0, seed=3, max_tokens=LENGTH, ignore_eos=True)
FRESH = SamplingParams(temperature=1.0, seed=3, max_tokens=LENGTH, presence_penalty=1.5, n=2)
ASKED = [greedy(LENGTH), SAMPLED, SAMPLED, FRESH]


def decoder(method: str, **more: Any) -> LLM:
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 4}
    if method.startswith("draft"):
        config["model"] = drafter("llama")
    if method == "draft_tree":
        config["branching"] = [2, 1]
    options = {"max_num_seqs": 4, "max_model_len": CONTEXT, "max_num_batched_tokens": 6, **more}
    return LLM(target("llama"), speculative_config=config, **options)


def played(llm: LLM) -> list[EngineRequest]:
    """Plays requests of several kinds; no round leaves too many tokens."""
    asked = zip(PROMPTS, ASKED, strict=True)
    requests = [one for prompt, params in asked for one in llm.requests(prompt, params)]
    held: list[int] = []

    def note(trace: Round) -> None:
        held.append(sum(llm.engine.target.lengths))

    for request in requests:
        llm.engine.add(request)
    with llm.engine.observing(note):
        while llm.engine.has_unfinished_requests:
            llm.engine.step()
    assert max(held) <= LIMIT or not any(one.preemptions for one in requests)
    return requests


@pytest.mark.parametrize(
    ("method", "caching"),
    [("draft_model", False), ("draft_model", True), ("draft_tree", False), ("ngram", True)],
)
def test_a_text_that_is_put_aside_goes_on_where_it_was(method: str, caching: bool) -> None:
    free = played(decoder(method))
    short = played(decoder(method, max_batch_total_tokens=LIMIT, enable_prefix_caching=caching))
    assert [one.output_ids for one in short] == [one.output_ids for one in free]
    assert [one.finish_reason for one in short] == [one.finish_reason for one in free]
    assert sum(one.preemptions for one in short) > 1
    assert all(one.cached_tokens <= len(one.prompt_ids) for one in short)


LEARNING: dict[str, dict[str, Any]] = {
    "a bandit": {"method": "ucb", "drafters": [NGRAM, {"model": drafter("llama")}]},
    "guesses": {"method": "pass"},
}


def learner(name: str, **options: Any) -> LLM:
    config = {"num_speculative_tokens": 4, **LEARNING[name]}
    if name == "guesses":
        plain = LLM(target("llama"), max_model_len=CONTEXT)
        config |= find_drafter("pass").dummy_options(plain.target)
    return LLM(
        target("llama"),
        speculative_config=config,
        max_num_seqs=4,
        max_model_len=CONTEXT,
        max_num_batched_tokens=6,
        **options,
    )


@pytest.mark.parametrize("name", LEARNING)
def test_what_was_learned_of_a_seeded_text_comes_back_with_it(name: str) -> None:
    """Where rounds begin and end is a part of what a seeded, sampled text follows from."""

    def written(llm: LLM) -> list[EngineRequest]:
        requests = [one for prompt in PROMPTS for one in llm.requests(prompt, SAMPLED)]
        for request in requests:
            llm.engine.add(request)
        while llm.engine.has_unfinished_requests:
            llm.engine.step()
        return requests

    free, short = written(learner(name)), written(learner(name, max_batch_total_tokens=LIMIT))
    assert [one.output_ids for one in short] == [one.output_ids for one in free]
    assert [one.metrics.num_target_passes for one in short] == [
        one.metrics.num_target_passes for one in free
    ]
    assert sum(one.preemptions for one in short) > 1


def test_the_window_of_a_drafter_with_a_short_context_stays_where_it_was() -> None:
    short = copy.deepcopy(drafter("llama", 0.2))
    short.config.max_position_embeddings = 24
    asked = replace(SAMPLED, max_tokens=100)

    def written(**options: Any) -> list[EngineRequest]:
        config = {"model": short, "num_speculative_tokens": 6}
        llm = LLM(
            target("llama"),
            speculative_config=config,
            max_num_seqs=4,
            max_model_len=CONTEXT,
            **options,
        )
        requests = [one for prompt in PROMPTS for one in llm.requests(prompt, asked)]
        for request in requests:
            llm.engine.add(request)
        while llm.engine.has_unfinished_requests:
            llm.engine.step()
        return requests

    free, short_of_room = written(), written(max_batch_total_tokens=LIMIT)
    assert sum(one.preemptions for one in short_of_room) > 1
    assert [one.output_ids for one in short_of_room] == [one.output_ids for one in free]


def test_who_comes_last_leaves_first() -> None:
    llm = decoder("none", max_batch_total_tokens=250, scheduling_policy="priority")
    first, last = (llm.requests(PROMPTS[0], greedy(110), priority=p)[0] for p in (1, 5))
    middle = llm.requests(PROMPTS[0], greedy(110), priority=3)[0]
    for request in (last, middle, first):
        llm.engine.add(request)
    left: list[EngineRequest] = []
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
        aside = [one for one in (first, middle, last) if one.preemptions and one not in left]
        left += aside
    assert left == [last, middle]
    assert [one.preemptions for one in (first, middle, last)] == [0, 1, 1]


def test_a_text_that_was_put_aside_may_end_there() -> None:
    llm = decoder("none", max_batch_total_tokens=LIMIT)
    requests = [llm.requests(PROMPTS[0], greedy(110))[0] for _ in range(3)]
    for request in requests:
        llm.engine.add(request)
    while not requests[2].preemptions:
        llm.engine.step()
    llm.engine.remove(requests[2])
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    assert [one.finish_reason for one in requests] == ["length", "length", "abort"]
    assert len(llm.engine.waiting) <= 1  # the one that ended is taken out when its turn comes
    llm.engine.step()
    assert not len(llm.engine.waiting)


@pytest.mark.parametrize("before", [True, False])
def test_an_interruption_while_a_row_leaves_costs_no_text(
    before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = decoder("ngram", max_batch_total_tokens=LIMIT)
    requests = [llm.requests(PROMPTS[0], greedy(80))[0] for _ in range(4)]
    alone = decoder("ngram").generate(PROMPTS[0], greedy(80))[0].outputs[0].token_ids
    for request in requests:
        llm.engine.add(request)
    retain, interrupted = llm.engine.target.retain, []

    def interrupting(rows: Any, texts: Any = None) -> None:
        first = not interrupted and any(request.preemptions for request in requests)
        if first and before:
            interrupted.append(True)
            raise KeyboardInterrupt
        retain(rows, texts)
        if first:
            interrupted.append(True)
            raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine.target, "retain", interrupting)
    while llm.engine.has_unfinished_requests:
        try:
            llm.engine.step()
        except KeyboardInterrupt:
            assert interrupted
    assert interrupted
    assert [one.output_ids for one in requests] == [alone] * 4
    assert not len(llm.engine.waiting)


def test_room() -> None:
    (one,) = decoder("none").requests([1] * 20, greedy(5))
    room = TokenLimit(2 * (20 + HEADROOM) + 2 * HEADROOM)
    assert room.admits([], one)
    assert room.admits([one], one)
    assert not room.admits([one, one], one)
    assert not room.exceeded([one] * 3)
    assert room.exceeded([one] * 4)
    assert not TokenLimit(1).exceeded([one]), "a single row always has room"
    assert TokenLimit(1).admits([], one)
    assert not TokenLimit(None).exceeded([one] * 100)
    room.note_drafts([3, 2 * HEADROOM])
    assert not room.admits([one], one), "long drafts need room as well"
    assert room.exceeded([one] * 3)
    room.note_drafts([3])
    assert room.admits([one], one), "but only as long as they are asked for"


def test_a_row_that_is_being_added_has_computed_nothing() -> None:
    """Another thread asks while the target has the row already."""
    llm = decoder("ngram")
    (request,) = llm.requests(PROMPTS[0], greedy(5))
    llm.engine.add(request)
    begin, found = llm.engine.drafter.begin, []

    def asking(requests: Any) -> None:
        found.append(llm.engine.num_computed_tokens(request))
        begin(requests)

    llm.engine.drafter.begin = asking  # type: ignore[method-assign]
    llm.engine.step()
    assert found == [0]


def test_whoever_is_put_back_waits_once() -> None:
    (one,) = decoder("none").requests([1], greedy(5))
    queue = RequestQueue()
    queue.add(one)
    queue.put_back([one])
    assert list(queue) == [one]


def test_a_limit_below_one_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="smaller max_model_len"):
        decoder("none", max_batch_total_tokens=CONTEXT - 1)
    with pytest.raises(ConfigError, match="max_batch_total_tokens must"):
        decoder("none", max_batch_total_tokens=0)
