"""What a prompt may look like, and what is said of what it may not."""

from __future__ import annotations

from typing import Any

import pytest

from outpace import LLM, SamplingParams
from outpace.errors import PromptError
from targets.families import target

GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(target("llama"))


def test_token_ids_may_come_in_a_dict(llm: LLM) -> None:
    (expected,) = llm.generate([[1, 2, 3]], GREEDY)
    alone: Any = {"prompt_token_ids": [1, 2, 3]}
    for prompts in (alone, [alone], [alone, [1, 2, 3]]):
        found = llm.generate(prompts, GREEDY)
        assert {tuple(output.token_ids) for output in found} == {tuple(expected.token_ids)}
    named = llm.generate({"prompt": "a text", "prompt_token_ids": [1, 2, 3]}, GREEDY)[0]
    assert (named.prompt, named.token_ids) == ("a text", expected.token_ids)


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ({"prompt_ids": [1]}, "not one with \\['prompt_ids'\\]"),
        ({"prompt": 3}, "as 'prompt' or 'prompt_token_ids'"),
        ({}, "a prompt is a text, a list of token ids"),
        ([None], "not None"),
        ([b"bytes"], "a prompt is a text"),
        (7, "prompts must be texts or lists of token ids, not 7"),
        ({"prompt_token_ids": ["a"]}, "whole numbers"),
        ({"prompt_token_ids": []}, "empty"),
    ],
)
def test_what_is_no_prompt_is_told_in_a_sentence(llm: LLM, prompt: Any, sentence: str) -> None:
    with pytest.raises(PromptError, match=sentence):
        llm.generate(prompt, GREEDY)
