"""A prompt that begins like an ended text reads only the rest, and the text is the same."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from engine.registering import register
from outpace import LLM
from outpace.core.proposal import Needs
from outpace.engine.request import EngineRequest
from outpace.methods.lookup.ngram import NgramDrafter
from outpace.targets.hf.prefixes import WORTHWHILE, PrefixStore, SavedPrefix
from targets.families import CONTEXT, drafter, target
from targets.generating import greedy

FIRST = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]


def decoder(family: str, saved: bool, method: str = "draft_model") -> LLM:
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "draft_model":
        config["model"] = drafter(family)
    return LLM(
        target(family),
        speculative_config=config,
        max_num_seqs=3,
        max_model_len=CONTEXT,
        enable_prefix_caching=saved,
    )


def played(llm: LLM, prompts: list[list[int]], tokens: int = 12) -> list[EngineRequest]:
    requests = [llm.requests(prompt, greedy(tokens))[0] for prompt in prompts]
    for request in requests:
        llm.engine.add(request)
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    return requests


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_the_second_turn_costs_its_new_tokens_only(family: str, method: str) -> None:
    llm, other = decoder(family, True, method), decoder(family, False, method)
    (first,) = played(llm, [FIRST])
    turns = [[*first.token_ids, 7, 7], [*first.token_ids[:20], 9, 8]]
    again, apart = played(llm, turns), played(other, turns)
    assert [one.output_ids for one in again] == [one.output_ids for one in apart]
    # The last token of a text is never cached: nothing has followed it.
    assert [one.cached_tokens for one in again] == [first.length - 1, 20]
    assert [one.cached_tokens for one in apart] == [0, 0]


def test_the_next_turn_reads_as_many_tokens_as_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = decoder("llama", True, "ngram")
    (first,) = played(llm, [FIRST * 4])
    read = []
    score = llm.engine.target.score
    monkeypatch.setattr(
        llm.engine.target, "score", lambda plan: read.append(len(plan.pending[0])) or score(plan)
    )
    monkeypatch.setattr(
        llm.engine.target.runner, "prefill", lambda *args, **named: pytest.fail("a prompt is read")
    )
    played(llm, [[*first.token_ids, 7, 7, 7]], tokens=2)
    assert read[0] == 1 + 3  # the last token of the first turn, and three new ones


def test_short_beginnings_are_not_worth_copying() -> None:
    llm = decoder("llama", True)
    played(llm, [FIRST])
    (other,) = played(llm, [[*FIRST[: WORTHWHILE - 1], 60, 61]])
    assert other.cached_tokens == 0


def test_a_text_that_goes_on_takes_the_place_of_its_beginning() -> None:
    texts = PrefixStore(limit=2)
    texts.add(FIRST[:16], SavedPrefix())
    texts.add(FIRST, SavedPrefix())
    assert len(texts) == 1
    texts.add([*FIRST[:16], 0], SavedPrefix())
    assert texts.find(FIRST)[0] == len(FIRST)  # used last
    texts.add([5] * 20, SavedPrefix())
    assert len(texts) == 2
    assert texts.find([*FIRST[:16], 0])[0] == 16  # of the other one


def test_a_text_that_is_too_long_to_be_kept_drives_no_other_away() -> None:
    texts = PrefixStore(limit=8, tokens=40)
    texts.add(FIRST, SavedPrefix())
    assert not texts.takes(41)
    assert (len(texts), texts.find(FIRST)[0]) == (1, len(FIRST))
    texts.add([5] * 40, SavedPrefix())
    assert (len(texts), texts.find([5] * 50)[0]) == (1, 40)


def test_a_text_that_is_too_long_to_be_kept_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = decoder("llama", True)
    target: Any = llm.engine.target
    target._saved.tokens = len(FIRST)
    monkeypatch.setattr(target.runner, "save", lambda *_: pytest.fail("keys are copied"))
    played(llm, [FIRST])
    assert len(target._saved) == 0


def test_interrupted_steps_forget_what_was_saved() -> None:
    llm = decoder("llama", True)
    played(llm, [FIRST])
    assert llm.memory["target_cache"] > 0
    llm.engine.target.reset()
    (again,) = played(llm, [FIRST])
    assert again.cached_tokens == 0


class AllStates(NgramDrafter):
    """A look-up that wants the target's states of every token of a prompt."""

    name: ClassVar[str] = "all_states"
    needs: Needs = Needs(hidden_layers=(-1,))


def test_for_a_drafter_of_all_states_nothing_is_kept_and_that_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, AllStates)
    config = {"method": "all_states", "num_speculative_tokens": 3}
    limits = {"max_num_seqs": 3, "max_model_len": CONTEXT}
    llm = LLM(target("llama"), speculative_config=config, enable_prefix_caching=True, **limits)
    assert "enable_prefix_caching does nothing with method 'all_states'" in caplog.text
    played(llm, [FIRST])
    assert not llm.engine.target.has_prefix_cache
    assert played(llm, [FIRST])[0].cached_tokens == 0


# -- conversations, where nothing is said about caching -------------------------------------------


def talkative(method: str = "draft_model", **more: Any) -> LLM:
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "draft_model":
        config["model"] = drafter("llama")
    given = {"speculative_config": config, "max_num_seqs": 3, "max_model_len": CONTEXT, **more}
    return LLM(target("llama"), **given)


def test_a_conversation_stays_cached_by_default_and_other_texts_do_not() -> None:
    llm = talkative()
    (said,) = llm.requests(FIRST, greedy(12), keep_cached=True)
    other = llm.requests(FIRST[::-1], greedy(12))[0]
    for request in (said, other):
        llm.engine.add(request)
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    turns = [[*said.token_ids, 7, 7], [*other.token_ids, 7, 7]]
    (goes_on,) = llm.requests(turns[0], greedy(4), keep_cached=True)
    (apart,) = llm.requests(turns[1], greedy(4), keep_cached=True)
    (asked_alone,) = llm.requests(turns[0], greedy(4))
    for request in (asked_alone, apart, goes_on):
        llm.engine.add(request)
        while llm.engine.has_unfinished_requests:
            llm.engine.step()
    assert goes_on.cached_tokens == said.length - 1
    assert (apart.cached_tokens, asked_alone.cached_tokens) == (0, 0)
    assert goes_on.output_ids == asked_alone.output_ids


def test_the_last_few_conversations_stay_and_no_more_tokens_than_one_context_has() -> None:
    llm = talkative(max_num_seqs=16)
    target_of: Any = llm.engine.target
    assert (target_of._saved.limit, target_of._saved.tokens) == (4, CONTEXT)
    assert talkative(enable_prefix_caching=False).engine.target.has_prefix_cache is False


@pytest.mark.parametrize("method", ["all_states", "none"])
def test_what_cannot_be_kept_is_not_and_nobody_who_did_not_ask_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    register(monkeypatch, AllStates)
    config = {"method": method, **({} if method == "none" else {"num_speculative_tokens": 3})}
    llm = talkative(speculative_config=config, batch_invariant=method == "none")
    invariant: Any = llm.engine.target
    kept = method == "none" and invariant.invariance.rereads
    assert llm.engine.target.has_prefix_cache is kept
    assert "enable_prefix_caching" not in caplog.text
    for turn in (FIRST, [*FIRST, 7, 7]):
        (request,) = llm.requests(turn, greedy(4), keep_cached=True)
        llm.engine.add(request)
        while llm.engine.has_unfinished_requests:
            llm.engine.step()
    assert bool(request.cached_tokens) is kept
