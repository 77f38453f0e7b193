"""Streamed pieces are whole characters, never taken back, and add up to the text."""

from __future__ import annotations

from typing import Any

import pytest

from outpace import LLM, Chunk, SamplingParams
from targets.families import build, noised

from .texts import SIZE, helper, ids_of, spelled, text_decoder, tokenizer, writer

UNFINISHED = "\ufffd"


def streamed(llm: LLM, text: str, **options: Any) -> list[Chunk]:
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": len(ids_of(text)), **options}
    params = SamplingParams(logits_processors=[spelled(text)], ignore_eos=True, **settings)
    return list(llm.stream("go:", params))


def joined(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


@pytest.mark.parametrize(
    ("method", "k"), [("none", 1), ("draft_model", 1), ("draft_model", 3), ("draft_model", 8)]
)
@pytest.mark.parametrize("text", ["plain words", "emoji 😀🎉 and é, 漢字, 👩‍👩‍👧", "ends with 😀"])
def test_pieces_are_whole_characters_and_add_up(text: str, method: str, k: int) -> None:
    chunks = streamed(text_decoder(method, k), text)
    assert joined(chunks) == text
    assert UNFINISHED not in joined(chunks)
    assert [token for chunk in chunks for token in chunk.token_ids] == ids_of(text)
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "length"


def test_a_text_cut_inside_a_character_says_so_only_at_its_end() -> None:
    chunks = streamed(text_decoder(), "ab😀", max_tokens=4)
    assert joined(chunks) == "ab" + UNFINISHED
    assert UNFINISHED not in joined(chunks[:-1])


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("stop", ["STOP", "S", "top", "OP it"])
def test_nothing_is_shown_that_a_stop_string_swallows(stop: str, k: int) -> None:
    text = "we STand, STOP it, top it"
    chunks = streamed(text_decoder("draft_model", k), text, stop=stop)
    expected = text[: text.index(stop)]
    assert joined(chunks) == expected
    shown = ""
    for chunk in chunks:
        shown += chunk.text
        assert expected.startswith(shown)
    assert chunks[-1].finish_reason == "stop"


def test_a_piece_that_only_looked_like_a_stop_string_is_shown_later() -> None:
    assert joined(streamed(text_decoder("none"), "a STO b ST", stop="STOP")) == "a STO b ST"


def test_streaming_and_generating_give_the_same() -> None:
    llm = text_decoder()
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=30)
    whole = llm.generate("go:", params)[0]
    chunks = list(llm.stream("go:", params))
    assert joined(chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids


def test_several_streamed_texts_keep_apart() -> None:
    llm = text_decoder()
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=12, n=3)
    texts = ["", "", ""]
    for chunk in llm.stream("go:", params):
        texts[chunk.index] += chunk.text
    assert texts == [output.text for output in llm.generate("go:", params)[0].outputs]


# -- interruptions ---------------------------------------------------------------------------------


def test_an_abandoned_stream_leaves_the_engine_empty() -> None:
    llm = text_decoder()
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    expected = llm.generate("go:", params)[0].token_ids
    stream = llm.stream("go:", params)
    next(stream)
    assert llm.engine.has_unfinished_requests
    stream.close()
    assert not llm.engine.has_unfinished_requests
    assert llm.generate("go:", params)[0].token_ids == expected


def test_a_stream_that_was_never_begun_leaves_nothing_behind() -> None:
    llm = text_decoder()
    llm.stream("go:", SamplingParams(max_tokens=5))
    assert not llm.engine.has_unfinished_requests


@pytest.mark.parametrize("at", [2, 5])
def test_an_interrupt_leaves_the_engine_usable(at: int) -> None:
    llm = text_decoder(rows=2)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = llm.generate(["go:", "a", "bc"], params)

    def interrupt(history: Any, scores: Any) -> Any:
        if history.shape[1] > 3 + at:
            raise KeyboardInterrupt
        return scores

    stopping = SamplingParams(
        temperature=0, max_tokens=20, ignore_eos=True, logits_processors=[interrupt]
    )
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["go:", "a", "bc"], [stopping, params, params])
    assert not llm.engine.has_unfinished_requests
    again = llm.generate(["go:", "a", "bc"], params)
    assert [o.token_ids for o in again] == [o.token_ids for o in expected]


# -- drafters that do not quite fit ----------------------------------------------------------------


@pytest.mark.parametrize("ours", [SIZE, SIZE + 7])
@pytest.mark.parametrize("theirs", [SIZE, SIZE + 3, SIZE + 20])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_vocabularies_padded_differently_make_no_difference(
    ours: int, theirs: int, temperature: float
) -> None:
    options = SamplingParams(temperature=temperature, seed=2, max_tokens=16)
    texts = []
    for config in (
        {"method": "none"},
        {"model": helper(theirs), "tokenizer": tokenizer(), "num_speculative_tokens": 4},
    ):
        llm = LLM(
            writer(ours), tokenizer=tokenizer(), speculative_config={**config, "verify": "coupled"}
        )
        texts.append(llm.generate(["go:", "é"], options))
    plain, drafted = texts
    assert [o.token_ids for o in plain] == [o.token_ids for o in drafted]
    assert all(token < SIZE for output in plain for token in output.token_ids)


def test_a_drafter_with_a_shorter_context_reads_the_end_of_the_text() -> None:
    small = noised(writer(), 0.05)
    small.config.max_position_embeddings = 20
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = ["a prompt of some length: ", "x"]
    plain = LLM(writer(), tokenizer=tokenizer()).generate(prompts, params)
    llm = text_decoder(model=small, tokenizer=tokenizer())
    drafted = llm.generate(prompts, params)
    assert [o.token_ids for o in drafted] == [o.token_ids for o in plain]
    assert all(output.metrics.num_draft_tokens > 60 for output in drafted)


def test_a_drafter_of_another_family_changes_nothing() -> None:
    other = build("gpt2", vocab_size=SIZE)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    plain = LLM(writer(), tokenizer=tokenizer()).generate("go:", params)
    llm = text_decoder(model=other, tokenizer=tokenizer())
    assert llm.generate("go:", params)[0].token_ids == plain[0].token_ids
