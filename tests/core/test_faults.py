"""A row without a distribution is an error that names the row and the cause, and never a token."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.core.faults import Contradiction, NotFinite, ProcessorFault, RowFault
from outpace.core.logits_pipeline import Branches, History, LogitsPipeline, RowOptions
from outpace.core.params import SamplingParams
from outpace.errors import ParamsError

VOCABULARY = 4
TEMPERATURES = [0.0, 0.9]
ROOT_AND_CHILD = Branches(torch.tensor([[[2], [2]]] * 2), torch.tensor([[[False], [True]]] * 2))


def pipeline(temperature: float = 1.0, **options: Any) -> LogitsPipeline:
    """Two rows; the options are the second one's."""
    plain = SamplingParams(temperature=temperature)
    other = SamplingParams(temperature=temperature, **options)
    return LogitsPipeline([RowOptions(params.resolve({})) for params in (plain, other)], VOCABULARY)


def logits(nodes: int = 1) -> Tensor:
    return torch.arange(VOCABULARY).float().expand(2, nodes, -1).clone()


def probs(made: LogitsPipeline, scores: Tensor, branches: Branches | None = None) -> Tensor:
    history = History([[1], [1]], [[], [0]])
    return made(scores, branches or Branches.root(2), history)


CALLS: list[Callable[[LogitsPipeline, Tensor], Tensor]] = [
    lambda made, scores: probs(made, scores),
    lambda made, scores: made.argmax_tokens(
        scores, Branches.root(2), History([[1], [1]], [[], [0]])
    ),
    lambda made, scores: made.softmax_probs(
        scores, Branches.root(2), History([[1], [1]], [[], [0]])
    ),
    lambda made, scores: made.process_logits(
        scores, Branches.root(2), History([[1], [1]], [[], [0]])
    ),
]


@pytest.mark.parametrize("call", CALLS, ids=["distribution", "best", "soft", "adjusted"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_logits_that_are_no_numbers_name_the_row_and_the_model(
    call: Callable[[LogitsPipeline, Tensor], Tensor], value: float, temperature: float
) -> None:
    scores = logits()
    scores[1, 0, 2] = value
    with pytest.raises(NotFinite, match="the model's scores") as caught:
        call(pipeline(temperature), scores)
    assert caught.value.row == 1
    assert isinstance(caught.value, ParamsError)


@pytest.mark.parametrize("call", CALLS, ids=["distribution", "best", "soft", "adjusted"])
def test_a_drafters_logits_that_are_no_numbers_name_the_drafter(
    call: Callable[[LogitsPipeline, Tensor], Tensor],
) -> None:
    scores, made = logits(), pipeline()
    scores[1, 0, 2] = math.nan
    with made.drafting(), pytest.raises(NotFinite, match="the drafter's scores"):
        call(made, scores)
    with pytest.raises(NotFinite, match="the model's scores"):
        call(made, scores)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_logits_that_forbid_everything_are_the_models_fault(temperature: float) -> None:
    scores = logits()
    scores[1] = -math.inf
    with pytest.raises(NotFinite, match="the model's scores"):
        probs(pipeline(temperature), scores)


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.5}, {"typical_p": 0.5}])
def test_truncation_hides_no_bad_score(options: dict[str, Any]) -> None:
    scores = logits()
    scores[1, 0, 0] = math.nan
    with pytest.raises(NotFinite):
        probs(pipeline(**options), scores)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_penalty_that_overflows_is_named(temperature: float) -> None:
    with pytest.raises(NotFinite, match="repetition_penalty=1e-300") as caught:
        probs(pipeline(temperature, repetition_penalty=1e-300), logits())
    assert caught.value.row == 1


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_options_that_forbid_everything_are_a_contradiction(temperature: float) -> None:
    made = pipeline(temperature, allowed_token_ids=[1])
    scores = logits()
    scores[1, 0, 1] = -math.inf
    with pytest.raises(Contradiction) as caught:
        probs(made, scores)
    assert caught.value.row == 1
    assert isinstance(caught.value, RowFault)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_drafted_node_without_a_distribution_is_a_dead_end(
    value: float, temperature: float
) -> None:
    scores = logits(nodes=2)
    scores[1, 1] = value
    made = pipeline(temperature)
    found = probs(made, scores, ROOT_AND_CHILD)
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 2))
    assert {row: list(nodes) for row, nodes in made.dead_ends.items()} == {1: [1]}
    assert isinstance(made.dead_ends[1][1], NotFinite)
    probs(made, logits(nodes=2), ROOT_AND_CHILD)
    assert made.dead_ends == {}, "they are those of the last call"


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_on_another_device_a_single_bool_says_whether_to_look(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = logits(nodes=2)
    made = pipeline(temperature)
    probs(made, scores, ROOT_AND_CHILD)
    assert made.unread_dead_ends is None, "on a CPU everything has been looked at"
    monkeypatch.setattr(made._ends, "_waits", False)
    probs(made, scores, ROOT_AND_CHILD)
    assert made.unread_dead_ends is not None
    assert not made.unread_dead_ends
    scores[1, 1] = math.nan
    probs(made, scores, ROOT_AND_CHILD)
    assert made.unread_dead_ends is not None
    assert made.unread_dead_ends
    assert {row: list(nodes) for row, nodes in made.dead_ends.items()} == {1: [1]}
    assert made.unread_dead_ends is None


# -- logits processors -----------------------------------------------------------------------------


def returns_nothing(ids: Tensor, scores: Tensor) -> None:
    scores += 1


def raises(ids: Tensor, scores: Tensor) -> Tensor:
    raise KeyError("off the grammar")


class Narrow:
    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        return scores[:, :2]


BAD: dict[str, tuple[Any, str]] = {
    "nothing": (returns_nothing, "'returns_nothing' returned nothing; it must return the scores"),
    "a list": (lambda ids, scores: [0.0] * VOCABULARY, "returned a list"),
    "one dimension": (lambda ids, scores: scores[0], r"returned scores of the shape \[4\]"),
    "another width": (Narrow(), r"'Narrow' returned scores of the shape \[1, 2\]"),
    "NaN": (lambda ids, scores: scores * math.nan, "the highest is nan"),
    "infinity": (lambda ids, scores: scores + math.inf, "the highest is inf"),
    "an exception": (raises, "'raises' raised KeyError: 'off the grammar'"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_processor_that_fails_on_the_text_is_named(name: str, temperature: float) -> None:
    processor, message = BAD[name]
    with pytest.raises(ProcessorFault, match=message) as caught:
        probs(pipeline(temperature, logits_processors=[processor]), logits())
    assert caught.value.row == 1
    assert isinstance(caught.value.__cause__, KeyError) == (name == "an exception")


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_processor_may_fail_on_drafted_tokens(name: str, temperature: float) -> None:
    bad = BAD[name][0]

    def at_two(ids: Tensor, scores: Tensor) -> Tensor:
        return bad(ids, scores) if ids[0, -1] == 2 else scores

    made = pipeline(temperature, logits_processors=[at_two])
    found = probs(made, logits(nodes=2), ROOT_AND_CHILD)
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 2))
    plain = probs(pipeline(temperature), logits(nodes=2), ROOT_AND_CHILD)
    assert found[0].equal(plain[0])
    assert found[1, 0].equal(plain[1, 0])
    assert isinstance(made.dead_ends[1][1], ProcessorFault)


def test_a_device_is_not_asked_about_a_fault_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that fails leaves scores that look like those of any other node."""

    def at_two(ids: Tensor, scores: Tensor) -> Tensor:
        return BAD["NaN"][0](ids, scores) if ids[0, -1] == 2 else scores

    made = pipeline(1.0, logits_processors=[at_two])
    monkeypatch.setattr(made._ends, "_waits", False)
    probs(made, logits(nodes=2), ROOT_AND_CHILD)
    assert made.unread_dead_ends is None, "which says that they have to be looked at"
    assert isinstance(made.dead_ends[1][1], ProcessorFault)


def test_an_interruption_is_no_fault_of_the_processor() -> None:
    def interrupted(ids: Tensor, scores: Tensor) -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        probs(pipeline(logits_processors=[interrupted]), logits())
