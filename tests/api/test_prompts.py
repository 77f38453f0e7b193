"""What a prompt may look like, and what is said of what it may not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from api.words import word_tokenizer
from outpace import LLM, SamplingParams
from outpace.errors import PromptError
from targets.families import target

GREEDY = SamplingParams(temperature=0, max_tokens=4)
IDS = [11, 12, 13]
OTHER = [21]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(target("llama"), tokenizer=word_tokenizer())


def prompts_read(llm: LLM, prompts: Any) -> list[list[int]]:
    return [output.prompt_token_ids for output in llm.generate(prompts, GREEDY)]


def test_token_ids_may_come_in_a_dict(llm: LLM) -> None:
    (expected,) = llm.generate([[1, 2, 3]], GREEDY)
    alone: Any = {"prompt_token_ids": [1, 2, 3]}
    for prompts in (alone, [alone], [alone, [1, 2, 3]]):
        found = llm.generate(prompts, GREEDY)
        assert {tuple(output.token_ids) for output in found} == {tuple(expected.token_ids)}
    named = llm.generate({"prompt": "a text", "prompt_token_ids": [1, 2, 3]}, GREEDY)[0]
    assert (named.prompt, named.token_ids) == ("a text", expected.token_ids)


ONE: dict[str, Any] = {
    "a list": IDS,
    "a tuple": tuple(IDS),
    "a range": range(11, 14),
    "a generator": (token for token in IDS),
    "numpy's numbers": [np.int64(token) for token in IDS],
    "tensors without dimension": list(torch.tensor(IDS)),
    "an array": np.array(IDS),
    "a tensor": torch.tensor(IDS),
    "a tensor of one row": torch.tensor([IDS]),
    "a list with a tensor": [torch.tensor(IDS)],
    "a list with a tensor of one row": [torch.tensor([IDS])],
    "a dict with a tensor": {"prompt_token_ids": torch.tensor(IDS)},
    "a dict with None": {"prompt": "w11 w12 w13", "prompt_token_ids": None},
    "a tokenizer's output": word_tokenizer()("w11 w12 w13"),
    "a tokenizer's output in a list": [word_tokenizer()("w11 w12 w13")],
    "a tokenizer's tensors": word_tokenizer()("w11 w12 w13", return_tensors="pt"),
    "without a mask": word_tokenizer()("w11 w12 w13", return_attention_mask=False),
    "padded on the left": {"input_ids": [0, 0, *IDS], "attention_mask": [0, 0, 1, 1, 1]},
    "padded on the right": {"input_ids": [[*IDS, 0]], "attention_mask": [[1, 1, 1, 0]]},
}


@pytest.mark.parametrize("name", ONE)
def test_one_prompt_of_token_ids_may_come_as(llm: LLM, name: str) -> None:
    read = prompts_read(llm, ONE[name])
    assert read == [IDS]
    assert {type(token) for token in read[0]} == {int}


TEXTS = ["w11 w12 w13", "w21"]
SEVERAL: dict[str, Any] = {
    "texts": TEXTS,
    "lists": [IDS, OTHER],
    "tensors": [torch.tensor(IDS), torch.tensor([OTHER])],
    "a tokenizer's lists": word_tokenizer()(TEXTS),
    "a tokenizer's padded lists": word_tokenizer()(TEXTS, padding=True),
    "a tokenizer's padded tensors": word_tokenizer()(TEXTS, padding=True, return_tensors="pt"),
    "one output each": [word_tokenizer()(text, return_tensors="pt") for text in TEXTS],
}


@pytest.mark.parametrize("name", SEVERAL)
def test_several_prompts_may_come_as(llm: LLM, name: str) -> None:
    assert prompts_read(llm, SEVERAL[name]) == [IDS, OTHER]


def test_a_stream_takes_the_same(llm: LLM) -> None:
    expected = llm.generate(IDS, GREEDY)[0].token_ids
    for prompt in (torch.tensor([IDS]), word_tokenizer()("w11 w12 w13", return_tensors="pt")):
        chunks = llm.stream(prompt, GREEDY)
        assert [token for chunk in chunks for token in chunk.token_ids] == expected


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ({"prompt_ids": [1]}, "not one with \\['prompt_ids'\\]"),
        ({"prompt": 3}, "as 'prompt' or 'prompt_token_ids'"),
        ({}, "a prompt is a text, a list of token ids"),
        ([None], "not None"),
        ([b"bytes"], "a prompt is a text"),
        (b"abc", "not b'abc'"),
        (bytearray(b"abc"), "texts or lists of token ids"),
        (7, "prompts must be texts or lists of token ids, not 7"),
        ({"prompt_token_ids": ["a"]}, "whole numbers, not 'a'"),
        ({"prompt_token_ids": b"abc"}, "a prompt is a text"),
        ({"prompt_token_ids": []}, "empty"),
        ([True, False], "whole numbers, not True"),
        ([1.0, 2], "a prompt is a text"),
        (torch.tensor([1.0, 2.0]), "whole numbers, not 1.0"),
        (torch.tensor([[1, 2], [3, 4]]), "an array of 2 rows does not say which .* padding"),
        (torch.zeros(1, 1, 3, dtype=torch.long), "not an array of 3 dimensions"),
        (torch.zeros(0, dtype=torch.long), "empty"),
        (torch.tensor(3), "texts or lists of token ids"),
        ({"input_ids": torch.tensor([[1, 2], [3, 4]])}, "does not say which .* padding"),
        ({"input_ids": [1, 2], "attention_mask": [1]}, "the shape of input_ids"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "in the middle of a prompt"),
        ({"input_ids": [[1], 2], "attention_mask": [[1], 1]}, "mixes single numbers and rows"),
        ({"input_ids": 3, "attention_mask": 1}, "input_ids must be token ids"),
        ({"input_ids": [1], "pixel_values": 0}, "reads text only: leave out .'pixel_values'."),
        ({"input_ids": [1, 2], "attention_mask": [0, 0]}, "empty"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_prompt_is_told_in_a_sentence(llm: LLM, prompt: Any, sentence: str) -> None:
    with pytest.raises(PromptError, match=sentence):
        llm.generate(prompt, GREEDY)


def test_a_stream_is_of_one_prompt(llm: LLM) -> None:
    with pytest.raises(PromptError, match="one prompt was expected here, and 2 were given"):
        llm.stream(word_tokenizer()(TEXTS, padding=True), GREEDY)
    with pytest.raises(PromptError, match="one prompt was expected here, not a list of them"):
        llm.stream(TEXTS, GREEDY)  # type: ignore[arg-type]


def test_a_token_that_was_added_and_has_no_weights_is_named() -> None:
    tokenizer = word_tokenizer()
    tokenizer.add_tokens(["w64"])
    llm = LLM(target("llama"), tokenizer=tokenizer)
    said = "'w64' in the prompt is token 64 of the tokenizer"
    with pytest.raises(PromptError, match=said):
        llm.generate("w11 w64", GREEDY)
    with pytest.raises(PromptError, match=said):
        llm.chat([{"role": "user", "content": "w11 w64"}], GREEDY)
    with pytest.raises(PromptError, match=r"must be whole numbers in \[0, 64\)"):
        llm.generate([[11, 64]])
