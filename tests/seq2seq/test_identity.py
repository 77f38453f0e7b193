"""Drafts change no word of an encoder-decoder: the texts are those of transformers' generate."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from outpace import LLM, SamplingParams
from outpace.outputs import RequestOutput
from representatives import representatives
from seq2seq.models import CONTEXT, FAMILIES, LENGTH, PROMPTS, drafter, features, plain, target

GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH)
BEGINNINGS: tuple[tuple[int, ...], ...] = ((), (4, 5, 6, 7), (9,))
"""What the decoders of the three rows begin with, after the token that all texts start with."""
SOME = ("t5", "bart", "whisper")
"""Positions that are a bias, positions that are added, and a source that is heard; all families
draft trees."""


def prompts_of(family: str) -> list[Any]:
    """The prompts of three rows, ragged on both sides."""
    hears = family == "whisper"
    sources = [{"input_features": heard} for heard in features()] if hears else PROMPTS
    start = target(family).generation_config.decoder_start_token_id
    made: list[Any] = []
    for source, begin in zip(sources, BEGINNINGS, strict=True):
        decoder = [start, *begin] if begin else None
        made.append(
            {"multi_modal_data": {"audio": source}, "decoder_prompt": decoder}
            if hears
            else {"encoder_prompt": source, "decoder_prompt": decoder}
        )
    return made


@cache
def expected(family: str) -> list[list[int]]:
    return [plain(target(family), row, begin=begin) for row, begin in enumerate(BEGINNINGS)]


def speaking(family: str, **config: Any) -> LLM:
    if config["method"] != "ngram":
        config["model"] = drafter(family)
    return LLM(target(family), speculative_config=config, max_model_len=CONTEXT)


def check(llm: LLM, family: str) -> list[RequestOutput]:
    """Checks three rows at once, and the first of them alone; returns what was written."""
    prompts = prompts_of(family)
    outputs = llm.generate(prompts, GREEDY)
    assert [output.token_ids for output in outputs] == expected(family)
    (alone,) = llm.generate(prompts[1], GREEDY)
    assert alone.token_ids == expected(family)[1]
    return outputs


@pytest.mark.parametrize("family", representatives(FAMILIES, SOME))
def test_a_look_up_changes_no_word(family: str) -> None:
    llm = speaking(family, method="ngram", num_speculative_tokens=3, prompt_lookup_min=1)
    assert len({tuple(text) for text in expected(family)}) == len(PROMPTS)  # sources do matter
    assert len({token for text in expected(family) for token in text}) > 2
    check(llm, family)


@pytest.mark.parametrize("family", representatives(FAMILIES, SOME))
def test_a_smaller_encoder_decoder_changes_no_word(family: str) -> None:
    outputs = check(speaking(family, method="draft_model", num_speculative_tokens=3), family)
    drafted = sum(output.metrics.num_draft_tokens for output in outputs)
    assert 0 < sum(output.metrics.num_accepted_tokens for output in outputs) < drafted


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_changes_no_word(family: str) -> None:
    config = {"method": "draft_tree", "num_speculative_tokens": 6, "branching": [3, 1, 1]}
    outputs = check(speaking(family, **config), family)
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 0
