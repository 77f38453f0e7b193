"""``verify="coupled"``: one text per seed, whatever is drafted."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest

from outpace import SamplingParams
from representatives import representatives
from targets.families import PROMPTS, drafter
from targets.generating import decoder, ids

LENGTH = 14
OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.0},
    "top_p": {"temperature": 1.2, "top_p": 0.9},
    "top_k": {"temperature": 1.5, "top_k": 7},
    "min_p": {"temperature": 1.5, "min_p": 0.1},
    "typical_p": {"temperature": 1.0, "typical_p": 0.8},
    "repetition_penalty": {"temperature": 1.0, "repetition_penalty": 1.5},
    "presence_penalty": {"temperature": 1.0, "presence_penalty": 1.5},
    "frequency_penalty": {"temperature": 1.0, "frequency_penalty": 1.5},
    "logit_bias": {"temperature": 1.0, "logit_bias": {3: 5.0, 4: -5.0}},
    "allowed_token_ids": {"temperature": 1.0, "allowed_token_ids": [1, 4, 9, 16, 25]},
    "bad_words_ids": {"temperature": 1.0, "bad_words_ids": [[24], [3, 3], [7, 24, 1]]},
    "min_tokens": {"temperature": 1.0, "min_tokens": 6, "stop_token_ids": range(0, 64, 2)},
    "logits_processors": {
        "temperature": 1.0,
        "logits_processors": [lambda history, scores: scores * (0.5 + history[0, -1] % 3)],
    },
    "greedy": {"temperature": 0.0},
}


def params(name: str, seed: int = 3) -> SamplingParams:
    return SamplingParams(max_tokens=LENGTH, seed=seed, **OPTIONS[name])


@cache
def plainly(name: str) -> list[list[int]]:
    return ids(decoder("llama", "none", verify="coupled").generate(PROMPTS, params(name)))


@pytest.mark.parametrize(
    ("method", "name"),
    representatives(
        itertools.product(["ngram", "draft_model"], OPTIONS),
        lambda method, name: method == "draft_model" or name in ("top_p", "greedy"),
    ),
)
def test_no_option_makes_the_text_depend_on_the_drafter(method: str, name: str) -> None:
    llm = decoder("llama", method, 4, verify="coupled")
    assert ids(llm.generate(PROMPTS, params(name))) == plainly(name)


@pytest.mark.parametrize(
    ("method", "k"),
    representatives(
        itertools.product(["ngram", "draft_model", "draft_tree"], range(1, 9)),
        lambda method, k: k in (1, 3, 8),
    ),
)
def test_nor_does_the_draft_length(method: str, k: int) -> None:
    more = {"model": drafter("llama", 0.15)} if method != "ngram" else {}
    llm = decoder("llama", method, k, rows=2, verify="coupled", **more)
    assert ids(llm.generate(PROMPTS, params("top_p"))) == plainly("top_p")


@pytest.mark.parametrize("speculative", ["off", 0, 1, 7])
def test_nor_does_what_the_request_says_of_speculation(speculative: Any) -> None:
    llm = decoder("llama", "draft_model", 4, verify="coupled")
    options = SamplingParams(max_tokens=LENGTH, seed=3, speculative=speculative, **OPTIONS["top_p"])
    outputs = llm.generate(PROMPTS, options)
    assert ids(outputs) == plainly("top_p")
    drafted = [output.metrics.num_draft_tokens for output in outputs]
    assert all(drafted) if speculative in (1, 7) else not any(drafted)


def test_seeds_give_different_texts() -> None:
    llm = decoder("llama", "draft_model", 4, verify="coupled")
    texts = {tuple(llm.generate([[1, 2]], params("top_p", seed))[0].token_ids) for seed in range(6)}
    assert len(texts) == 6


def test_some_drafts_are_accepted_and_some_are_not() -> None:
    llm = decoder("llama", "draft_model", 4, verify="coupled")
    metrics = [output.metrics for output in llm.generate(PROMPTS, params("temperature"))]
    accepted = sum(m.num_accepted_tokens for m in metrics)
    assert 0 < accepted < sum(m.num_draft_tokens for m in metrics)
