"""The same requests with speculation off and on: every answer is the same.

Without speculation all are answered whole, one after another; with speculation many at once, and
most of them as streams, whose pieces have to make up the same text.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Sequence
from typing import Any

import openai
import pytest

from outpace import LLM

from .conftest import MODEL, running

STARTS = (
    "Once upon a time",
    "The dog",
    "Lily and Tom went to the park. They",
    '"Look!" said Mum.',
    "One day a big, red ball",
)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.8, "top_p": 0.9, "seed": 11, "n": 2},
    {"temperature": 1.2, "seed": 3, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"temperature": 0.7, "seed": 5, "stop": ["."]},
    {"temperature": 1.0, "seed": 6, "logit_bias": {"20": 5.0, "18": -100}},
    {"temperature": 1.0, "seed": 8, "extra_body": {"top_k": 9, "repetition_penalty": 1.3}},
    {"temperature": 1.0, "seed": 9, "extra_body": {"min_p": 0.05, "ignore_eos": True}},
    {"temperature": 1.0, "seed": 10, "extra_body": {"guided_regex": "[a-z ]{5,30}\\."}},
    {"temperature": 1.0, "seed": 4, "stop": ["e", "the"], "extra_body": {"min_tokens": 6}},
)
REQUESTS = [
    {"start": start, "chat": bool(index % 2), "stream": bool(index % 3), **options}
    for index, (start, options) in enumerate(itertools.product(STARTS[:2], SETTINGS))
]


ENDS = ("Tom", "In the garden", "A cat and a dog", 'Mum said, "No', "The end", "He")
MORE_STARTS = (*STARTS, *ENDS)
FORMS: tuple[dict[str, Any], ...] = (
    {"guided_regex": "[A-Z][a-z ]{3,20}[.!]"},
    {"guided_choice": ["yes", "no", "perhaps not"]},
    {"guided_json": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}},
)


def drawn(number: int) -> dict[str, Any]:
    """Returns one of very many requests, always the same one for a number."""
    draws = random.Random(number)
    request: dict[str, Any] = {
        "start": draws.choice(MORE_STARTS),
        "chat": draws.random() < 0.5,
        "stream": draws.random() < 0.8,
        "temperature": draws.choice((0, 0, 0.5, 0.8, 1.0, 1.0, 1.4)),
        "seed": draws.randrange(1000),
        "max_tokens": draws.choice((1, 2, 7, 16, 31)),
    }
    body: dict[str, Any] = {}
    choices: tuple[tuple[float, dict[str, Any], dict[str, Any]], ...] = (
        (0.2, request, {"n": draws.choice((2, 3))}),
        (0.2, request, {"top_p": draws.choice((0.5, 0.9))}),
        (0.2, request, {"presence_penalty": 0.7}),
        (0.2, request, {"frequency_penalty": draws.choice((-0.5, 0.8))}),
        (0.2, request, {"stop": draws.choice((".", ["e", "the"], ["\n", '"']))}),
        (0.2, request, {"logit_bias": {str(draws.randrange(300)): 4.0, "18": -100}}),
        (0.2, body, {"top_k": draws.choice((1, 9, 50))}),
        (0.2, body, {"min_p": 0.05}),
        (0.2, body, {"typical_p": 0.9}),
        (0.2, body, {"repetition_penalty": 1.3}),
        (0.2, body, {"min_tokens": 5 if request["max_tokens"] > 5 else 0}),
        (0.2, body, draws.choice(FORMS)),
    )
    for chance, where, options in choices:
        if draws.random() < chance:
            where.update(options)
    if any(name.startswith("guided") for name in body):
        body.pop("min_tokens", None)  # a form may not allow so many, and is then refused
    return {**request, "extra_body": body}


async def answered(client: openai.AsyncOpenAI, request: dict[str, Any], speculative: Any) -> Any:
    """Returns texts, finish reasons, tokens with their log-probabilities, and usage."""
    given = dict(request)
    start, chat, stream = given.pop("start"), given.pop("chat"), given.pop("stream")
    body = {**given.pop("extra_body", {}), "speculative": speculative}
    given = {"model": MODEL, "max_tokens": 16, "extra_body": body, **given}
    if stream:
        given |= {"stream": True, "stream_options": {"include_usage": True}}
    if chat:
        messages = [{"role": "user", "content": start}]
        given |= {"messages": messages, "logprobs": True, "top_logprobs": 2}
        answer = await client.chat.completions.create(**given)
    else:
        answer = await client.completions.create(prompt=start, logprobs=2, **given)
    chunks = [chunk async for chunk in answer] if stream else [answer]
    return joined(chunks, given.get("n", 1))


def joined(chunks: list[Any], n: int) -> dict[str, Any]:
    texts, reasons, probs = [""] * n, [None] * n, [[] for _ in range(n)]
    for chunk in chunks:
        for choice in chunk.choices:
            at = choice.index
            texts[at] += text_of(choice)
            reasons[at] = choice.finish_reason or reasons[at]
            probs[at] += probs_of(choice.logprobs)
    used = chunks[-1].usage
    usage = (used.prompt_tokens, used.completion_tokens, used.total_tokens)
    return {"texts": texts, "reasons": reasons, "usage": usage, "logprobs": probs}


def text_of(choice: Any) -> str:
    said = getattr(choice, "message", None) or getattr(choice, "delta", None)
    return choice.text if said is None else said.content or ""


def probs_of(logprobs: Any) -> list[tuple[str, float]]:
    if logprobs is None:
        return []
    if getattr(logprobs, "tokens", None) is not None:
        return list(zip(logprobs.tokens, logprobs.token_logprobs, strict=True))
    return [(token.token, token.logprob) for token in logprobs.content or ()]


async def replayed(
    url: str, requests: Sequence[dict[str, Any]], speculative: Any, at_once: int
) -> list[Any]:
    gate = asyncio.Semaphore(at_once)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        async def one(request: dict[str, Any]) -> Any:
            async with gate:
                return await answered(client, request, speculative)

        return await asyncio.gather(*map(one, requests))


def check_that_all_are_the_same(llm: LLM, requests: Sequence[dict[str, Any]]) -> None:
    whole = [{**request, "stream": False} for request in requests]
    with running(llm) as url:
        plain = asyncio.run(replayed(url, whole, "off", at_once=1))
        fast = asyncio.run(replayed(url, requests, 4, at_once=8))
    for request, slow, quick in zip(requests, plain, fast, strict=True):
        shown = json.dumps(request)
        for part in ("texts", "reasons", "usage"):
            assert quick[part] == slow[part], shown
        for theirs, ours in zip(slow["logprobs"], quick["logprobs"], strict=True):
            assert [token for token, _ in ours] == [token for token, _ in theirs], shown
            expected = [value for _, value in theirs]
            assert [value for _, value in ours] == pytest.approx(expected, abs=2e-3), shown


def test_speculation_changes_no_answer(llm: LLM) -> None:
    check_that_all_are_the_same(llm, REQUESTS)


@pytest.mark.slow
def test_speculation_changes_none_of_500_answers(llm: LLM) -> None:
    check_that_all_are_the_same(llm, [drawn(number) for number in range(500)])
