"""Reported log-probabilities are those of the distribution that each token was drawn from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from devices import on_device
from outpace import SamplingParams
from outpace.engine.request import Logprob
from targets.families import PROMPTS, target
from targets.generating import METHODS, decoder

LENGTH = 12
COUNT = 3
PENALTY = RepetitionPenaltyLogitsProcessor(1.3)
OPTIONS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "greedy": ({"temperature": 0}, []),
    "greedy with a penalty": ({"temperature": 0, "repetition_penalty": 1.3}, [PENALTY]),
    "sampled": ({"temperature": 1.0}, []),
    "truncated": (
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3},
        [PENALTY, TemperatureLogitsWarper(1.5), TopKLogitsWarper(20), TopPLogitsWarper(0.9)],
    ),
}


def probs_after(ids: list[int], processors: list[Any]) -> torch.Tensor:
    """The next token's log-probabilities by transformers' own processors."""
    with torch.no_grad():
        history = on_device([ids])
        scores = target("llama")(history).logits[:, -1]
        return LogitsProcessorList(processors)(history, scores)[0].log_softmax(-1)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("method", METHODS)
def test_they_are_those_of_the_processed_scores(method: str, name: str) -> None:
    options, processors = OPTIONS[name]
    params = SamplingParams(max_tokens=LENGTH, seed=4, logprobs=COUNT, **options)
    llm = decoder("llama", method, 4)
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
        assert output.logprobs is not None
        assert len(output.logprobs) == len(output.token_ids)
        ids = list(prompt)
        for token, reported in zip(output.token_ids, output.logprobs, strict=True):
            check(reported, token, probs_after(ids, processors))
            ids.append(token)


def check(reported: dict[int, Logprob], token: int, distribution: torch.Tensor) -> None:
    assert token in reported
    top = distribution.topk(COUNT)
    assert set(top.indices.tolist()) <= set(reported)
    assert len(reported) <= COUNT + 1
    for other, entry in reported.items():
        assert entry.logprob == pytest.approx(float(distribution[other]), abs=1e-6)
        assert entry.rank == 1 + int((distribution > distribution[other]).sum())


@pytest.mark.parametrize("count", [None, 0, 64, 1000])
def test_how_many_are_reported(count: int | None) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=count)
    reported = decoder("llama", "draft_model").generate([[1, 2]], params)[0].logprobs
    if count is None:
        assert reported is None
    else:
        assert [len(entry) for entry in reported or []] == [max(1, min(count, 64))] * 4


def test_a_stop_cuts_them_off_too() -> None:
    params = SamplingParams(
        temperature=1.0, seed=1, max_tokens=30, logprobs=1, stop_token_ids=range(0, 64, 5)
    )
    for output in decoder("llama", "draft_model", 8).generate(PROMPTS, params):
        assert len(output.logprobs or []) == len(output.token_ids) < 30


def test_asking_for_them_changes_no_text() -> None:
    llm = decoder("llama", "draft_model")
    without = SamplingParams(temperature=1.0, seed=7, max_tokens=LENGTH)
    asked = SamplingParams(temperature=1.0, seed=7, max_tokens=LENGTH, logprobs=2)
    mixed = llm.generate(PROMPTS, [asked, without, asked, without])
    plain = llm.generate(PROMPTS, without)
    assert [o.token_ids for o in mixed] == [o.token_ids for o in plain]
    assert mixed[1].logprobs is None
