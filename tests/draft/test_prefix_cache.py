"""What earlier texts began with, too, a draft model does not read again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from outpace import LLM, SamplingParams
from outpace.draft import prefix_cache
from outpace.draft.prefix_cache import PrefixCache
from outpace.engine.request import EngineRequest
from outpace.policy.auto import AutoController
from targets.families import CONTEXT, build, drafter, noised, target
from targets.generating import greedy, ids

TEMPLATE = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
FIRST, SECOND = [*TEMPLATE, 6, 2, 6], [*TEMPLATE, 4, 3, 3, 8]


def engine_of(method: str = "draft_model", family: str = "llama", **options: Any) -> LLM:
    config: dict[str, Any] = {"method": method, "model": drafter(family)}
    if method == "draft_tree":
        config["branching"] = [2, 1]
    if method == "staged":
        config["lookup"] = {"method": "ngram"}
    config = {**config, **options.pop("config", {})}
    limits = {"max_num_seqs": 3, "max_model_len": CONTEXT, "compile": False}
    return LLM(target(family), speculative_config=config, **{**limits, **options})


def runner_of(llm: LLM) -> Any:
    found: Any = llm.engine.drafter
    return next(one for one in [*getattr(found, "children", []), found] if hasattr(one, "runner"))


@contextmanager
def read_by(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Collects the tokens that each of the drafter's passes was fed in its first row."""
    runner, found = runner_of(llm).runner, []
    forward = runner.forward

    def noting(tokens: Any, *given: Any, **named: Any) -> Any:
        found.append(tokens.shape[1])
        return forward(tokens, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "forward", noting)
        yield found


def first_pass(llm: LLM, prompt: list[int], asked: Any, patch: pytest.MonkeyPatch) -> int:
    with read_by(llm, patch) as fed:
        llm.generate(prompt, asked)
    return fed[0]


FIXED = {"num_speculative_tokens": 2}


@pytest.mark.parametrize("method", ["draft_model", "draft_tree", "staged"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_second_text_costs_its_own_tokens_only(
    method: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine_of(method, family, config=FIXED)
    plain = LLM(target(family), speculative_config={"method": "none"}, max_model_len=CONTEXT)
    guessed = int(method == "staged")  # a token after the text, which is fed along
    assert first_pass(llm, FIRST, greedy(6), monkeypatch) <= len(FIRST) + guessed
    assert first_pass(llm, SECOND, greedy(6), monkeypatch) <= len(SECOND[20:]) + guessed
    assert ids(llm.generate([FIRST, SECOND], greedy(9))) == ids(
        plain.generate([FIRST, SECOND], greedy(9))
    )


def test_what_is_drafted_is_what_would_have_been(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has read the same, sooner: it drafts the same tokens, with the same luck."""
    kept, apart = engine_of(config=FIXED), engine_of(config=FIXED)
    monkeypatch.setattr(runner_of(apart)._prefixes, "restore", lambda row, tokens: 0)
    drafts: dict[int, list[Any]] = {}
    for number, llm in enumerate((kept, apart)):
        found = drafts[number] = []
        with llm.engine.observing(lambda trace, found=found: found.append(trace.proposal.tokens)):
            llm.generate([FIRST], greedy(8))
            llm.generate([SECOND, FIRST], greedy(8))
    assert [one.tolist() for one in drafts[0]] == [one.tolist() for one in drafts[1]]


def test_a_draft_model_with_states_goes_on_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine_of(family="mamba", config=FIXED)
    plain = LLM(target("mamba"), speculative_config={"method": "none"}, max_model_len=CONTEXT)
    llm.generate(FIRST, greedy(8))
    turn = [*FIRST, *plain.generate(FIRST, greedy(4))[0].token_ids, 5, 1]
    assert first_pass(llm, turn, greedy(6), monkeypatch) < len(turn) - len(TEMPLATE)
    assert ids(llm.generate([turn], greedy(9))) == ids(plain.generate([turn], greedy(9)))


def test_a_seeded_text_is_drafted_by_its_own_history_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine_of(config=FIXED)
    llm.generate(FIRST, greedy(6))
    seeded = SamplingParams(temperature=1.0, seed=4, max_tokens=6, ignore_eos=True)
    assert first_pass(llm, SECOND, seeded, monkeypatch) == len(SECOND)
    unseeded = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True)
    # The whole prompt but its last token was read for the seeded one.
    assert first_pass(llm, SECOND, unseeded, monkeypatch) == 1


def test_what_is_forgotten_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine_of("auto", config={**FIXED, "lookups": [{"method": "ngram"}]})
    first_pass(llm, FIRST, greedy(6), monkeypatch)
    llm.forget_texts()
    assert first_pass(llm, SECOND, greedy(6), monkeypatch) >= len(SECOND)


def test_the_controller_knows_what_is_left_to_read() -> None:
    llm = engine_of()
    controller: Any = llm.engine.controller
    assert isinstance(controller, AutoController)
    assert unread(llm, FIRST) == len(FIRST)
    assert unread(llm, [*TEMPLATE, *[8, 7] * 10]) == 20
    assert unread(llm, SECOND) == 0, "a few are read along with the last one"


def unread(llm: LLM, prompt: list[int]) -> int:
    """Returns what the controller takes for unread in a new text, which is then drafted for."""
    (request,) = llm.requests(prompt, SamplingParams(temperature=0, max_tokens=6, speculative=2))
    controller: Any = llm.engine.controller
    found: list[int] = []
    begin = controller.begin

    def begun(request: EngineRequest, known: Any) -> None:
        begin(request, known)
        found.extend(one.num_uncomputed_tokens(request) for one in controller._estimators)

    controller.begin = begun
    llm.engine.add(request)
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    del controller.begin
    (left,) = found
    return left


def test_only_the_beginnings_of_a_few_texts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "TOKENS", 24)
    llm = engine_of(config=FIXED)
    llm.generate([*TEMPLATE, *TEMPLATE], greedy(6))
    kept = runner_of(llm)._prefixes
    assert kept.known([*TEMPLATE, *TEMPLATE]) == 24
    assert runner_of(llm).nbytes == (
        runner_of(llm).weight_bytes + runner_of(llm).runner.nbytes + kept.nbytes
    )
    llm.generate([7] * 20, greedy(6))
    assert kept.known([7] * 20) == 20
    assert not kept.known(TEMPLATE), "there is no room for both"


def test_of_a_conversation_all_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "TOKENS", 24)
    llm = engine_of(config=FIXED)
    said = [*TEMPLATE, *TEMPLATE]
    (request,) = llm.requests(said, greedy(6), keep_cached=True)
    llm.engine.add(request)
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    kept: PrefixCache = runner_of(llm)._prefixes
    assert kept.known(request.token_ids) >= len(request.token_ids) - 3
    llm.generate([7] * 20, greedy(6))
    assert kept.known([7] * 20) == 20
    assert kept.known(request.token_ids) >= len(request.token_ids) - 3, "others have their own room"
    assert first_pass(llm, request.token_ids, greedy(4), monkeypatch) <= 4
    llm.forget_texts()
    assert not kept.nbytes


def test_without_prefix_caching_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client must not learn from the response time what another one was given."""
    llm = engine_of(config=FIXED, enable_prefix_caching=False)
    llm.generate(FIRST, greedy(6))
    assert first_pass(llm, SECOND, greedy(6), monkeypatch) == len(SECOND)
    assert not runner_of(llm)._prefixes.nbytes


def test_with_prefix_caching_it_keeps_as_much_as_the_target() -> None:
    llm = engine_of(config=FIXED, enable_prefix_caching=True)
    kept: PrefixCache = runner_of(llm)._prefixes
    assert (kept._texts.limit, kept._texts.tokens) == (3, None)
    turn = [*FIRST, *llm.generate(FIRST, greedy(8))[0].token_ids]
    assert kept.known(turn) >= len(turn) - 3


def test_a_window_lends_nothing_and_borrows_nothing() -> None:
    """Positions in a window count from its own beginning."""
    small = noised(build("llama", max_position_embeddings=48), 0.05)
    llm = engine_of(config={**FIXED, "model": small})
    plain = LLM(target("llama"), speculative_config={"method": "none"}, max_model_len=CONTEXT)
    for prompt in (TEMPLATE * 2, [*TEMPLATE * 2, 5, 5], FIRST):
        assert ids(llm.generate([prompt], greedy(40))) == ids(plain.generate([prompt], greedy(40)))
    assert not runner_of(llm)._prefixes.known([*TEMPLATE * 2][20:])
