"""Recorded requests, played with speculation off and on: every answer is the same."""

from __future__ import annotations

import asyncio
import itertools
import json
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
    for index, (start, options) in enumerate(itertools.product(STARTS, SETTINGS))
]


async def answered(client: openai.AsyncOpenAI, request: dict[str, Any], speculative: Any) -> Any:
    """Returns texts, finish reasons, tokens with their log-probabilities, and usage."""
    given = dict(request)
    start, chat, stream = given.pop("start"), given.pop("chat"), given.pop("stream")
    body = {**given.pop("extra_body", {}), "speculative": speculative}
    given |= {"model": MODEL, "max_tokens": 16, "extra_body": body}
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
    texts, reasons, laws = [""] * n, [None] * n, [[] for _ in range(n)]
    for chunk in chunks:
        for choice in chunk.choices:
            at = choice.index
            texts[at] += text_of(choice)
            reasons[at] = choice.finish_reason or reasons[at]
            laws[at] += laws_of(choice.logprobs)
    used = chunks[-1].usage
    usage = (used.prompt_tokens, used.completion_tokens, used.total_tokens)
    return {"texts": texts, "reasons": reasons, "usage": usage, "laws": laws}


def text_of(choice: Any) -> str:
    said = getattr(choice, "message", None) or getattr(choice, "delta", None)
    return choice.text if said is None else said.content or ""


def laws_of(logprobs: Any) -> list[tuple[str, float]]:
    if logprobs is None:
        return []
    if getattr(logprobs, "tokens", None) is not None:
        return list(zip(logprobs.tokens, logprobs.token_logprobs, strict=True))
    return [(token.token, token.logprob) for token in logprobs.content or ()]


async def replayed(url: str, speculative: Any, at_once: int) -> list[Any]:
    gate = asyncio.Semaphore(at_once)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        async def one(request: dict[str, Any]) -> Any:
            async with gate:
                return await answered(client, request, speculative)

        return await asyncio.gather(*map(one, REQUESTS))


def test_speculation_changes_no_answer(llm: LLM) -> None:
    with running(llm) as url:
        plain = asyncio.run(replayed(url, "off", at_once=1))
        fast = asyncio.run(replayed(url, 4, at_once=8))
    assert len(plain) == 50
    for request, slow, quick in zip(REQUESTS, plain, fast, strict=True):
        shown = json.dumps(request)
        for part in ("texts", "reasons", "usage"):
            assert quick[part] == slow[part], shown
        for theirs, ours in zip(slow["laws"], quick["laws"], strict=True):
            assert [token for token, _ in ours] == [token for token, _ in theirs], shown
            expected = [value for _, value in theirs]
            assert [value for _, value in ours] == pytest.approx(expected, abs=2e-3), shown
