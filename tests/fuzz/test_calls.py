"""Options, prompts and chats of every kind: an answer, or an error that tells what to do."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from fuzz.attack import ANYTHING, answered, examples
from outpace import LLM, SamplingParams

OPTIONS = [option.name for option in dataclasses.fields(SamplingParams)]
TOKENS = st.integers(0, 63)
SOUND: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 3),
    "temperature": st.floats(0, 3),
    "top_k": st.integers(-1, 100),
    "top_p": st.floats(1e-300, 1),
    "min_p": st.floats(0, 1),
    "typical_p": st.floats(1e-300, 1),
    "repetition_penalty": st.floats(1e-3, 1e3),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(TOKENS, st.floats(-100, 100), max_size=3),
    "allowed_token_ids": st.lists(TOKENS, min_size=1, max_size=5),
    "bad_words": st.lists(st.sampled_from(["w5", "w6 w7", "unknown"]), max_size=2),
    "bad_words_ids": st.lists(st.lists(TOKENS, min_size=1, max_size=3), max_size=3),
    "logits_processors": st.just([lambda ids, scores: scores]),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "max_tokens": st.integers(1, 12),
    "min_tokens": st.integers(0, 12),
    "stop": st.one_of(st.text(min_size=1, max_size=3), st.lists(st.just("w7"), max_size=2)),
    "stop_token_ids": st.lists(TOKENS, max_size=3),
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.booleans(),
    "logprobs": st.integers(0, 80),
    "skip_special_tokens": st.booleans(),
    "speculative": st.one_of(st.sampled_from(["auto", "off"]), st.integers(0, 40)),
    "tag": st.text(min_size=1, max_size=5),
    "structured_outputs": st.just({"regex": "(w5 ?)*"}),
    "prediction": st.one_of(st.just("w5 w6"), st.lists(TOKENS, max_size=8)),
}
"""What each option is meant to take."""


@st.composite
def sound_options(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(OPTIONS), unique=True, max_size=6))
    drawn = {name: draw(SOUND[name]) for name in names}
    if "min_tokens" in drawn:  # more than may be written would be refused, and nothing else tried
        drawn["min_tokens"] = min(drawn["min_tokens"], drawn.get("max_tokens", 4))
    return drawn


def test_every_option_is_fuzzed() -> None:
    assert set(SOUND) == set(OPTIONS)


@examples(700)
@given(st.dictionaries(st.sampled_from([*OPTIONS, "temprature"]), ANYTHING, max_size=3))
def test_sampling_params_of_anything(options: dict[str, Any]) -> None:
    answered(lambda: SamplingParams(**options))


@examples(200)
@given(options=sound_options(), odd=st.dictionaries(st.sampled_from(OPTIONS), ANYTHING, max_size=1))
def test_texts_with_options_of_every_kind(
    llm: LLM, options: dict[str, Any], odd: dict[str, Any]
) -> None:
    asked = {"max_tokens": 4, **options, **odd}
    n = asked.get("n")
    if isinstance(n, int) and n > 3:
        asked["n"] = 3  # thousands of texts are an answer too, but a slow one
    outputs = answered(lambda: llm.generate([[5, 6, 7, 5, 6], "w8 w9"], asked))
    assert outputs is None or all(output.finished for output in outputs)


IDS = st.lists(st.one_of(TOKENS, st.integers(-2, 80)), max_size=60)
PROMPTS = st.one_of(
    ANYTHING,
    IDS,
    st.text(max_size=12),
    st.lists(st.one_of(IDS, st.text(max_size=8), ANYTHING), max_size=3),
    IDS.map(torch.tensor),
    st.fixed_dictionaries(
        {},
        optional={
            "prompt": st.one_of(st.just("w5 w6"), ANYTHING),
            "prompt_token_ids": st.one_of(IDS, ANYTHING),
            "input_ids": st.one_of(IDS, st.lists(IDS, max_size=2), ANYTHING),
            "attention_mask": st.one_of(st.lists(st.integers(0, 1), max_size=4), ANYTHING),
        },
    ),
)


@examples(300)
@given(prompts=PROMPTS, streamed=st.booleans())
def test_prompts_of_every_kind(llm: LLM, prompts: Any, streamed: bool) -> None:
    params = SamplingParams(temperature=0, max_tokens=2)
    call = (lambda: list(llm.stream(prompts, params))) if streamed else None
    answered(call or (lambda: llm.generate(prompts, params)))


PARTS = st.one_of(
    st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url"]), "text": ANYTHING}),
    st.just({"type": "text", "text": "w5"}),
    ANYTHING,
)
MESSAGES = st.one_of(
    st.fixed_dictionaries(
        {
            "role": st.one_of(st.sampled_from(["user", "system", "odd"]), ANYTHING),
            "content": st.one_of(st.just("w5"), st.lists(PARTS, max_size=2), ANYTHING),
        }
    ),
    ANYTHING,
)


@examples(200)
@given(
    st.one_of(ANYTHING, st.lists(MESSAGES, max_size=3), st.lists(st.lists(MESSAGES, max_size=2)))
)
def test_chats_of_every_kind(llm: LLM, messages: Any) -> None:
    answered(lambda: llm.chat(messages, SamplingParams(temperature=0, max_tokens=2)))


def test_the_engine_is_whole_afterwards(llm: LLM) -> None:
    """Runs last: nothing that was refused above has left anything after."""
    params = SamplingParams(temperature=0, max_tokens=6)
    fresh = LLM(llm.target.model, max_model_len=48)
    for prompt in ([5, 6, 7, 5, 6], [9]):
        assert (
            llm.generate(prompt, params)[0].token_ids == fresh.generate(prompt, params)[0].token_ids
        )
