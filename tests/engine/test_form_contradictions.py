"""Options that leave no text of the form are refused before one is written, where few texts tell
that; what is found later ends that text alone."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from outpace import LLM
from outpace.engine.request import EngineRequest
from outpace.errors import ParamsError
from outpace.forms.contradictions import BEGINNINGS
from outpace.forms.grammars import Grammar

from .texts import END, ids_of, text_decoder

A, B, C = ids_of("abc")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return text_decoder(verify="coupled")


def played(llm: LLM, form: dict[str, Any], **options: Any) -> list[EngineRequest]:
    requests = llm.requests(
        "go:", {"max_tokens": 30, "temperature": 0.0, **options, "structured_outputs": form}
    )
    for request in requests:
        llm.engine.add(request)
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    return requests


@pytest.mark.parametrize(
    ("form", "options", "about", "words"),
    [
        ({"regex": "a"}, {"min_tokens": 5}, "min_tokens",
         "min_tokens=5 cannot be reached, since a text of this form ends after 1 token at the "
         "latest: lower it"),
        ({"choice": ["ab", "abcab"]}, {"min_tokens": 9}, "min_tokens", "ends after 5 tokens"),
        ({"grammar": 'start: ""'}, {"min_tokens": 1}, "min_tokens", "ends after 0 tokens"),
        ({"regex": "ab|ac"}, {"min_tokens": 3}, "min_tokens", "ends after 2 tokens"),
        ({"regex": "a"}, {"min_tokens": 2, "stop_token_ids": [B]}, "min_tokens", "1 token"),
        ({"regex": "ab"}, {"min_tokens": 9, "stop": "b"}, "min_tokens", "2 tokens"),
        ({"regex": "[ab]c"}, {"allowed_token_ids": [C, END]}, "allowed_token_ids",
         "allowed_token_ids and the form of the text together leave no token with which it could "
         "begin: relax one of them."),
        ({"regex": "[ab]c"}, {"allowed_token_ids": [A, B]}, "allowed_token_ids",
         "no token with which it could go on after 1 token:"),
        ({"regex": "[ab]c"}, {"allowed_token_ids": [A, B, C]}, "allowed_token_ids",
         "no token with which it could go on after 2 tokens:"),
        ({"regex": "[ab]c"}, {"bad_words": ["c"]}, "bad_words", "go on after 1 token:"),
        ({"regex": "ab"}, {"bad_words_ids": [[A, B]]}, "bad_words_ids", "go on after 1 token:"),
        ({"regex": "ab"}, {"bad_words_ids": [[ids_of(":")[0], A]]}, "bad_words_ids", "begin:"),
        ({"regex": "ab"}, {"logit_bias": {A: -math.inf, B: 1.0}}, "logit_bias", "begin:"),
        ({"regex": "a"}, {"allowed_token_ids": [B], "bad_words": ["a"]}, "structured_outputs",
         "allowed_token_ids, bad_words and the form of the text together leave no token"),
        ({"regex": "[ab]"}, {"allowed_token_ids": [C], "bad_words": ["a"]}, "allowed_token_ids",
         "allowed_token_ids and the form of the text together leave no token"),
    ],
)  # fmt: skip
def test_what_leaves_no_text_of_the_form_is_refused_by_name(
    llm: LLM, form: dict[str, Any], options: dict[str, Any], about: str, words: str
) -> None:
    with pytest.raises(ParamsError, match=re.escape(words)) as refused:
        llm.requests("go:", {**options, "structured_outputs": form})
    assert refused.value.option == about


@pytest.mark.parametrize(
    ("form", "options", "text", "reason"),
    [
        ({"regex": "[ab]c?"}, {"allowed_token_ids": [A, END]}, "a", "stop"),
        ({"regex": "[ab]c"}, {"allowed_token_ids": [B, C], "stop_token_ids": [C]}, "bc", "stop"),
        ({"regex": "ab"}, {"allowed_token_ids": [A, B], "stop": "b"}, "a", "stop"),
        ({"regex": "abcd"}, {"min_tokens": 2, "max_tokens": 3}, "abc", "length"),
        ({"regex": "ab"}, {"min_tokens": 2}, "ab", "stop"),
        ({"regex": "a{70}"}, {"min_tokens": 70, "max_tokens": 80}, "a" * 70, "stop"),
        ({"choice": ["ab"]}, {"bad_words": ["ba"]}, "ab", "stop"),
        ({"regex": "a|b{9}"}, {"min_tokens": 5, "bad_words": ["a"]}, "b" * 9, "stop"),
    ],
)
def test_what_leaves_some_text_is_written(
    llm: LLM, form: dict[str, Any], options: dict[str, Any], text: str, reason: str
) -> None:
    (request,) = played(llm, form, **options)
    assert (request.text, request.finish_reason) == (text, reason)


def test_what_only_the_writing_tells_ends_that_text_alone(llm: LLM) -> None:
    """There are more texts of nine letters than are looked at."""
    asked: list[tuple[Any, dict[str, Any]]] = [
        ({"regex": "[ab]{9}"}, {"min_tokens": 15}),
        ({"regex": "[ab]{9}"}, {"min_tokens": 9}),
    ]
    broken, whole = (
        llm.requests(
            "go:", {"max_tokens": 30, "temperature": 0.0, **options, "structured_outputs": form}
        )[0]
        for form, options in asked
    )
    for request in (broken, whole):
        llm.engine.add(request)
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    assert (broken.finish_reason, len(broken.output_ids)) == ("error", 9)
    assert "together forbid every token" in str(broken.error)
    assert (whole.finish_reason, len(whole.text)) == ("stop", 9)


def test_a_processor_may_allow_what_is_forbidden(llm: LLM) -> None:
    def lets_b(ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, B] = 0.0
        return scores

    options = {"allowed_token_ids": [A], "logits_processors": [lets_b], "max_tokens": 1}
    (request,) = played(llm, {"regex": "bc"}, **options)
    assert request.text == "b"


def test_no_processor_leads_out_of_a_form(llm: LLM) -> None:
    def all_alike(ids: Tensor, scores: Tensor) -> Tensor:
        return scores.new_zeros(scores.shape)

    for seed in range(4):
        options = {"logits_processors": [all_alike], "temperature": 1.0, "seed": seed}
        (request,) = played(llm, {"choice": ["bc", "ab"]}, **options)
        assert request.text in ("bc", "ab")


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many places each call of a grammar was asked about."""
    found: list[int] = []
    work = Grammar.allowed

    def counted(self: Grammar, output: Sequence[int], paths: Sequence[Sequence[int]]) -> Tensor:
        found.append(len(paths))
        return work(self, output, paths)

    monkeypatch.setattr(Grammar, "allowed", counted)
    return found


def test_a_form_alone_is_not_looked_at_again(llm: LLM, masks: list[int]) -> None:
    llm.requests(
        "go:", {"stop": "x", "temperature": 0.5, "structured_outputs": {"regex": "a[bc]{3}"}}
    )
    assert masks == [1]  # the first one, where the form was compiled
    llm.requests("go:", {"n": 3, "structured_outputs": {"regex": "a[bc]{3}"}})
    assert masks == [1]


@pytest.mark.parametrize("regex", ["a.*", "[ab]*c", "a*b"])
def test_few_beginnings_are_looked_at(llm: LLM, masks: list[int], regex: str) -> None:
    llm.requests("go:", {"min_tokens": 200, "structured_outputs": {"regex": regex}})
    assert 0 < sum(masks) <= BEGINNINGS + 1
