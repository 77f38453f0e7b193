"""Row i of any batch is what it is alone, whoever comes, goes or waits beside it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from outpace import LLM, SamplingParams
from outpace.engine.request import EngineRequest
from targets.families import CONTEXT, PROMPTS, drafter, target
from targets.generating import decoder, greedy, ids

LENGTH = 12
OPTIONS = {
    "greedy": greedy(LENGTH),
    "sampled": SamplingParams(temperature=1.0, max_tokens=11, seed=1),
    "top_k and top_p": SamplingParams(temperature=1.3, top_k=9, top_p=0.8, max_tokens=9, seed=2),
    "min_p": SamplingParams(temperature=1.5, min_p=0.05, max_tokens=LENGTH, seed=3),
    "typical_p": SamplingParams(temperature=1.0, typical_p=0.7, max_tokens=LENGTH, seed=4),
    "penalties": SamplingParams(
        temperature=1.0,
        repetition_penalty=1.4,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        max_tokens=LENGTH,
        seed=5,
    ),
    "biased": SamplingParams(
        temperature=1.0, logit_bias={5: 4.0, 6: float("-inf")}, max_tokens=LENGTH, seed=6
    ),
    "allowed": SamplingParams(
        temperature=1.0, allowed_token_ids=[1, 2, 3, 5, 8, 13], max_tokens=LENGTH, seed=7
    ),
    "bad words": SamplingParams(
        temperature=1.0, bad_words_ids=[[24], [3, 3]], max_tokens=LENGTH, seed=8
    ),
    "stops": SamplingParams(
        temperature=1.0, stop_token_ids=range(0, 64, 7), min_tokens=4, max_tokens=LENGTH, seed=9
    ),
    "own processor": SamplingParams(
        temperature=1.0,
        logits_processors=[lambda history, scores: scores * (1 + history.shape[1] % 3)],
        max_tokens=LENGTH,
        seed=10,
    ),
    "plain beside drafted": SamplingParams(
        temperature=1.0, speculative="off", max_tokens=LENGTH, seed=11
    ),
    "a K of its own": SamplingParams(temperature=1.0, speculative=2, max_tokens=LENGTH, seed=12),
}
ALL = [
    (list(prompt), options)
    for prompt, options in zip(itertools.cycle(PROMPTS), OPTIONS.values(), strict=False)
]


def alone(llm: LLM) -> list[list[int]]:
    return [llm.generate([prompt], options)[0].token_ids for prompt, options in ALL]


def together(llm: LLM, order: list[int]) -> list[list[int]]:
    outputs = llm.generate([ALL[i][0] for i in order], [ALL[i][1] for i in order])
    texts = dict(zip(order, ids(outputs), strict=True))
    return [texts[i] for i in range(len(ALL))]


@pytest.mark.parametrize(
    ("method", "verify"),
    [("none", "token"), ("ngram", "coupled"), ("draft_model", "token"), ("draft_model", "coupled")],
)
def test_all_options_side_by_side(method: str, verify: str) -> None:
    llm = decoder("llama", method, 4, rows=len(ALL), verify=verify)
    expected = alone(llm)
    assert len({tuple(text) for text in expected}) == len(ALL), "the options should differ"
    order = list(range(len(ALL)))
    assert together(llm, order) == expected
    assert together(llm, order[::-1]) == expected


def test_fewer_rows_than_requests() -> None:
    """Rows are freed and filled again in mid-run: neighbours, slots and lengths change."""
    llm = decoder("gemma3", "draft_model", 4, rows=3)
    assert together(llm, list(range(len(ALL)))) == alone(llm)


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_requests_that_join_later_change_nobody(method: str) -> None:
    llm = decoder("mistral", method, 3, rows=5)
    expected = alone(llm)
    waiting = [llm.input_processor.requests(prompt, options)[0] for prompt, options in ALL]
    started: list[EngineRequest] = []
    while waiting or llm.engine.has_unfinished_requests:
        for request in waiting[:1]:
            llm.engine.add(waiting.pop(0))
            started.append(request)
        llm.engine.step()
    assert [request.output_ids for request in started] == expected


def test_a_request_that_is_removed_changes_nobody() -> None:
    llm = decoder("llama", "draft_model", 3, rows=4)
    expected = alone(llm)
    kept = [llm.input_processor.requests(*ALL[i])[0] for i in (0, 1, 2)]
    lost = llm.input_processor.requests(*ALL[3])[0]
    for request in (kept[0], lost, *kept[1:]):
        llm.engine.add(request)
    llm.engine.step()
    llm.engine.remove(lost)
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    assert [request.output_ids for request in kept] == expected[:3]
    assert lost.finish_reason == "abort"
    assert lost.output_ids == expected[3][: len(lost.output_ids)]


def test_several_texts_of_one_request_are_the_requests_with_their_seeds() -> None:
    llm = decoder("llama", "draft_model", 3, rows=3)
    options = SamplingParams(temperature=1.0, max_tokens=LENGTH, seed=5, n=4)
    outputs = llm.generate([PROMPTS[0]], options)[0].outputs
    assert [output.index for output in outputs] == [0, 1, 2, 3]
    assert len({tuple(output.token_ids) for output in outputs}) == 4
    for output in outputs:
        single = SamplingParams(temperature=1.0, max_tokens=LENGTH, seed=output.seed)
        assert llm.generate([PROMPTS[0]], single)[0].token_ids == output.token_ids


def test_an_unset_seed_is_drawn_anew_and_reported() -> None:
    llm = LLM(target("llama"), speculative_config={"method": "none"}, max_model_len=CONTEXT)
    options = SamplingParams(temperature=1.0, max_tokens=LENGTH)
    first, second = (llm.generate([[1, 2]], options)[0].outputs[0] for _ in range(2))
    assert first.seed != second.seed
    again = llm.generate(
        [[1, 2]], SamplingParams(temperature=1.0, max_tokens=LENGTH, seed=first.seed)
    )
    assert again[0].token_ids == first.token_ids


@pytest.mark.parametrize("verify", ["token", "coupled"])
def test_a_seed_is_reported_where_it_gives_the_text_again(verify: str) -> None:
    """How much is drafted for an unseeded text follows from measured times."""
    config = {"model": drafter("llama"), "verify": verify, "num_speculative_tokens": "auto"}
    llm = LLM(target("llama"), speculative_config=config, max_model_len=CONTEXT)
    options = SamplingParams(temperature=1.0, max_tokens=LENGTH, ignore_eos=True)
    made = llm.generate([[1, 2]], options)[0].outputs[0]
    assert (made.seed is not None) == (verify == "coupled")
    given = llm.generate([[1, 2]], replace(options, seed=9 if made.seed is None else made.seed))
    again = llm.generate([[1, 2]], replace(options, seed=given[0].outputs[0].seed))
    assert again[0].token_ids == given[0].token_ids
    assert made.seed is None or given[0].token_ids == made.token_ids


@pytest.mark.parametrize(
    ("verify", "exact"), [("bild", False), ("joint", False), ("typical", True)]
)
def test_a_greedy_text_under_a_lossy_rule_repeats_itself_with_a_seed(
    verify: str, exact: bool
) -> None:
    """Under some rules it is the target's own; under others it follows from what was drafted."""
    config = {"model": drafter("llama"), "verify": verify, "num_speculative_tokens": "auto"}
    llm = LLM(target("llama"), speculative_config=config, max_model_len=CONTEXT)
    made = llm.generate([[1, 2]], greedy(LENGTH))[0].outputs[0]
    assert (made.seed is not None) == exact
    given = llm.generate([[1, 2]], greedy(LENGTH, seed=7))[0].outputs[0]
    assert given.seed == 7
    (request,) = llm.requests([1, 2], greedy(LENGTH, seed=7))
    llm.engine.add(request)
    assert request.reproducible != exact
