"""A planted difference is found, and a near-tie is told from other words."""

from __future__ import annotations

import torch

from outpace import LLM
from outpace.bench.statistics import compare, first_difference, gap_of
from outpace.bench.synthetic import Pair

NAMES, PROMPTS = ["a", "b"], [[1, 2], [3]]


def test_equal_texts_are_identical() -> None:
    found = compare(NAMES, PROMPTS, [[5, 6], [7]], [[5, 6], [7]])
    assert (found.compared, found.identical, found.differences) == (2, 2, ())
    assert found.explained


def test_a_planted_difference_is_found_where_it_is() -> None:
    asked: list[list[int]] = []

    def gap(ids: list[int], one: int, other: int) -> float:
        asked.append(ids)
        return 3.0

    found = compare(NAMES, PROMPTS, [[5, 6, 7], [8, 9]], [[5, 4, 7], [8, 9]], gap)  # type: ignore[arg-type]
    assert found.identical == 1
    difference = found.differences[0]
    assert (difference.prompt, difference.position) == ("a", 1)
    assert (difference.expected, difference.found, difference.gap) == (6, 4, 3.0)
    assert asked == [[1, 2, 5]]
    assert not found.explained


def test_a_near_tie_is_explained_and_a_missing_token_is_not() -> None:
    near = compare(["a"], [[1]], [[5]], [[6]], lambda *_: 1e-4)
    assert near.explained
    short = compare(["a"], [[1]], [[5, 6]], [[5]], lambda *_: 0.0)
    assert short.differences[0].position == 1
    assert not short.explained


def test_first_difference_of_a_prefix() -> None:
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_the_gap_is_that_of_the_targets_logits(pair: Pair) -> None:
    llm = LLM(pair.target)
    ids = [10, 20, 30]
    with torch.inference_mode():
        logits = llm.target.model(torch.tensor([ids])).logits[0, -1].double()
    top = logits.topk(2).indices.tolist()
    gap = gap_of(llm.engine.target)
    assert gap(ids, *top) > 0
    assert abs(gap(ids, *top) - float((logits[top[0]] - logits[top[1]]) / logits.std())) < 1e-4
    assert llm.engine.target.num_rows == 0
