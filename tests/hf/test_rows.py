"""Processors and criteria that know more than the row they are given: refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkLogitsProcessor,
)

from outpace.errors import ConfigError
from targets.families import VOCABULARY

from .generating import NEW, RAGGED, faster, generated

ROWS = len(RAGGED)
BIAS = 9 * torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(1)).double()
STOPS = torch.arange(ROWS) + RAGGED[:, -1]  # only the first row's prompt ends with its stop


def test_a_processor_that_counts_its_calls_is_refused() -> None:
    class Countdown(LogitsProcessor):
        def __init__(self) -> None:
            self.left = 100

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            self.left -= 1
            return scores + self.left * torch.arange(scores.shape[1])

    countdown = Countdown()
    with pytest.raises(ConfigError, match="Countdown gives other scores"):
        generated("one", faster(), logits_processor=LogitsProcessorList([countdown]))
    assert countdown.left == 100, "trying a processor must not use it up"


def test_a_watermark_with_a_memory_is_refused() -> None:
    synth = SynthIDTextWatermarkLogitsProcessor(
        ngram_len=3, keys=[1, 2], sampling_table_size=16, sampling_table_seed=0,
        context_history_size=8, device=torch.device("cpu"),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"SynthID.*state"):
        generated("one", faster(), logits_processor=LogitsProcessorList([synth]))


class ByRow(LogitsProcessor):
    """Scores that depend on the number of the row."""

    def __init__(self, bias: Callable[[Tensor], Tensor]) -> None:
        self.bias = bias

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + self.bias(input_ids)


PROCESSORS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "one for each row": (lambda ids: BIAS, r"scores of shape \[4, 64\]"),
    "as many as rows": (lambda ids: BIAS[: len(ids)], "otherwise than the same row alone"),
    "of all rows": (lambda ids: BIAS[int(ids.sum()) % ROWS], "otherwise than the same row alone"),
    "too few": (lambda ids: torch.zeros(64)[:, None], r"scores of shape \[64, 64\]"),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_that_knows_rows_is_refused(name: str) -> None:
    bias, message = PROCESSORS[name]
    own = LogitsProcessorList([ByRow(bias)])
    with pytest.raises(ConfigError, match=rf"logits processor ByRow .*{message}"):
        generated(custom=faster(), logits_processor=own)


def test_a_processor_of_each_rows_own_tokens_is_taken() -> None:
    own = LogitsProcessorList([ByRow(lambda ids: BIAS[ids[:, -1] % ROWS])])
    expected = generated(logits_processor=own)
    assert not torch.equal(expected, generated())
    assert torch.equal(generated(custom=faster(), logits_processor=own), expected)


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (lambda scores: scores[0], r"a tensor of shape \[64\]"),
        (lambda scores: scores[:, :9], r"a tensor of shape \[1, 9\]"),
        (lambda scores: None, "None"),
    ],
)
def test_an_answer_of_another_shape_later_in_the_text_is_an_error(made: Any, named: str) -> None:
    class Later(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
            return made(scores) if input_ids.shape[1] > RAGGED.shape[1] + 5 else scores

    with pytest.raises(ConfigError, match=rf"Later answered one row with {named}"):
        generated(custom=faster("none"), logits_processor=LogitsProcessorList([Later()]))


class Ends(StoppingCriteria):
    """Ends the rows that a function of all their tokens names."""

    def __init__(self, ends: Callable[[Tensor], Any]) -> None:
        self.ends = ends

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Any:
        return self.ends(input_ids)


CRITERIA: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "one for each row": (lambda ids: ids[:, -1] == STOPS, "answers one row with 4 values"),
    "as many as rows": (
        lambda ids: ids[:, -1] == STOPS[: len(ids)],
        "otherwise than the same row alone",
    ),
    "the first row": (lambda ids: bool(ids[0, -1] == 7), "otherwise than the same row alone"),
}


@pytest.mark.parametrize("name", CRITERIA)
def test_a_criterion_that_knows_rows_is_refused(name: str) -> None:
    ends, message = CRITERIA[name]
    own = StoppingCriteriaList([Ends(ends)])
    with pytest.raises(ConfigError, match=rf"stopping criterion Ends .*{message}"):
        generated(custom=faster(), stopping_criteria=own)


def test_a_criterion_that_counts_its_calls_is_refused() -> None:
    class Third(StoppingCriteria):
        calls = 0

        def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Any:
            self.calls += 1
            return torch.full((len(input_ids),), self.calls >= 3)

    third = Third()
    with pytest.raises(ConfigError, match="criterion Third gives another answer"):
        generated(custom=faster(), stopping_criteria=StoppingCriteriaList([third]))
    assert third.calls == 0, "trying a criterion must not use it up"


def test_several_values_later_in_the_text_are_an_error() -> None:
    own = StoppingCriteriaList([Ends(lambda ids: torch.zeros(1 + (ids.shape[1] > NEW)) > 0)])
    with pytest.raises(ConfigError, match=r"Ends answered one row with a tensor of shape \[2\]"):
        generated("one", faster("none"), stopping_criteria=own)
