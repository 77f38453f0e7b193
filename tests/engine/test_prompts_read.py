"""What reading prompts costs, and what goes on meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from outpace import LLM, SamplingParams
from targets.families import build, drafter, plain, target
from targets.generating import greedy, ids

CONTEXT = 2200


@pytest.fixture(scope="module")
def long_model() -> Any:
    return build("llama", max_position_embeddings=CONTEXT)


class Positions:
    """Counts the positions that a model computes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
        self.total = 0
        self.passes: list[tuple[int, ...]] = []
        model = llm.target.model
        forward = model.forward

        def counted(*args: Any, **options: Any) -> Any:
            shape = tuple(options["input_ids"].shape)
            self.passes.append(shape)
            self.total += shape[0] * shape[1]
            return forward(*args, **options)

        monkeypatch.setattr(model, "forward", counted)


def text(length: int, start: int = 0) -> list[int]:
    return [1 + (start + 7 * place) % 60 for place in range(length)]


def test_rows_are_read_at_their_own_length(
    monkeypatch: pytest.MonkeyPatch, long_model: Any
) -> None:
    llm = LLM(long_model, max_num_seqs=8)
    prompts = [text(2000), *(text(3, start) for start in range(7))]
    counted = Positions(monkeypatch, llm)
    llm.generate(prompts, greedy(1))
    assert counted.total <= 2021 + 8
    alone = [ids(LLM(long_model).generate([prompt], greedy(4)))[0] for prompt in prompts]
    assert ids(llm.generate(prompts, greedy(4))) == alone


@pytest.mark.parametrize("order", [1, -1])
def test_prompts_of_about_one_length_are_read_together(
    monkeypatch: pytest.MonkeyPatch, order: int
) -> None:
    llm = LLM(target("llama"), max_num_seqs=8)
    counted = Positions(monkeypatch, llm)
    prompts = [text(length) for length in range(40, 48)][::order]
    llm.generate(prompts, greedy(1))
    assert [shape[0] for shape in counted.passes] == [8, 8]
    assert counted.total <= 8 * 48


def test_the_samples_of_one_prompt_read_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model": drafter("llama"), "num_speculative_tokens": 3}
    llm = LLM(target("llama"), speculative_config=config, max_num_seqs=5)
    prompt = text(60)
    params = SamplingParams(n=8, seed=3, temperature=1.0, max_tokens=6, ignore_eos=True)
    counted = Positions(monkeypatch, llm)
    outputs = llm.generate([prompt], params)[0].outputs
    assert counted.total < 2 * 60 + 8 * 6 * 4
    reading = llm.engine.drafter.runner.passes
    for output in outputs:
        again = SamplingParams(seed=output.seed, temperature=1.0, max_tokens=6, ignore_eos=True)
        assert llm.generate([prompt], again)[0].token_ids == output.token_ids
    assert llm.engine.drafter.runner.passes - reading > reading // 2


@pytest.mark.parametrize("rows", [2, 5, 16])
@pytest.mark.parametrize("method", ["none", "draft_model"])
def test_samples_that_end_at_once_read_their_prompt_once(
    monkeypatch: pytest.MonkeyPatch, long_model: Any, method: str, rows: int
) -> None:
    config = {"method": method} | ({"model": drafter("llama")} if method != "none" else {})
    llm = LLM(long_model, speculative_config=config, max_num_seqs=rows)
    counted = Positions(monkeypatch, llm)
    params = SamplingParams(n=8, seed=3, temperature=1.0, max_tokens=1)
    outputs = llm.generate([text(1000), text(600, 5)], params)
    assert counted.total <= 1600 + 2 * 8
    for output in outputs:
        for one in output.outputs:
            again = SamplingParams(seed=one.seed, temperature=1.0, max_tokens=1)
            assert ids(llm.generate([output.prompt_token_ids], again)) == [one.token_ids]


def test_running_rows_go_on_while_a_long_prompt_is_read() -> None:
    config = {"method": "none"}
    llm = LLM(target("llama"), speculative_config=config, max_num_seqs=2, max_num_batched_tokens=8)
    first = llm.input_processor.requests(text(4), greedy(30))[0]
    second = llm.input_processor.requests(text(60), greedy(5))[0]
    llm.engine.add(first)
    llm.engine.step()
    llm.engine.add(second)
    written = []
    while not second.output_ids:
        llm.engine.step()
        written.append(len(first.output_ids))
    assert written == list(range(2, 2 + len(written)))
    assert len(written) == 8, "59 tokens are read in eight steps of at most eight"
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    expected = plain("llama", 30, (tuple(text(4)),))[0], plain("llama", 5, (tuple(text(60)),))[0]
    assert (first.output_ids, second.output_ids) == expected


@pytest.mark.parametrize("budget", [1, 7, 2048])
@pytest.mark.parametrize("lengths", [(1, 1), (2, 2, 2), (9, 1, 30), (30, 30), (31, 5, 31, 5)])
def test_texts_do_not_depend_on_how_prompts_are_read(lengths: Sequence[int], budget: int) -> None:
    prompts = [text(length, start) for start, length in enumerate(lengths)]
    config = {"model": drafter("llama"), "method": "draft_tree", "num_speculative_tokens": 4}
    llm = LLM(
        target("llama"), speculative_config=config, max_num_seqs=3, max_num_batched_tokens=budget
    )
    expected = plain("llama", 10, tuple(map(tuple, prompts)))
    assert ids(llm.generate(prompts, greedy(10))) == expected


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        LLM(target("llama"), max_num_batched_tokens=0)


def test_the_prompt_of_a_request_is_not_changed_by_what_is_generated() -> None:
    llm = LLM(target("llama"))
    prompt = text(5)
    request = llm.input_processor.requests(prompt, greedy(4))[0]
    llm.engine.add(request)
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    assert request.prompt_ids == text(5) == request.admitted_token_ids
    assert request.token_ids == [*text(5), *request.output_ids]
    assert len(request.output_ids) == 4
