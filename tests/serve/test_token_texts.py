"""Log-probabilities of tokens that are parts of characters, in OpenAI's own form."""

from __future__ import annotations

from typing import Any

import pytest

from engine.texts import ids_of, text_decoder
from engine.tokenizers_made import FAMILIES, pieces
from outpace.core.detokenizer import UNFINISHED
from outpace.core.text_decoder import TextDecoder
from outpace.engine.request import Logprob
from outpace.serve.engine_thread import Delta
from outpace.serve.openai.answers import ChatChoice, TextChoice, TokenTexts, _ranked

from .conftest import call, running

BY_NEIGHBOUR = ["WordPiece, cleaned up", "BPE with ends of words"]
"""Families in which the blank before a token depends on the token before it."""

COMMA, FIT, GROW = "\uff0c", "\u9002", "\u5408"


def fallback() -> TextDecoder:
    return TextDecoder(pieces())


def bytes_as(name: str) -> list[int]:
    """Returns the tokens that spell a text byte by byte."""
    found: list[int] = pieces().convert_tokens_to_ids([f"<0x{b:02X}>" for b in name.encode()])
    return found


def delta(tokens: list[int], *others: int) -> Delta:
    """Returns news of tokens, each with itself as the most probable and the others after it."""
    logprobs = [
        {t: Logprob(-float(rank), rank) for rank, t in enumerate([token, *others], 1)}
        for token in tokens
    ]
    return Delta(0, "", tokens, logprobs, None)


def test_completions_name_parts_of_characters_as_openai_does() -> None:
    """gpt-3.5-turbo-instruct wrote these names and places of a comma, a character in two tokens,
    and one in one."""
    decoder = fallback()
    tokens = [*bytes_as(COMMA), *bytes_as(FIT), *bytes_as(GROW)]
    choice = TextChoice(0, 0, TokenTexts(decoder), decoder.new_detokenizer())
    (item,) = choice.feed(delta(tokens))
    found = item["logprobs"]
    assert found["tokens"][3:6] == ["bytes:\\xe9", "bytes:\\x80", "bytes:\\x82"]
    assert found["text_offset"] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [list(probs) for probs in found["top_logprobs"]] == [
        [token] for token in found["tokens"]
    ]


def test_alternatives_that_are_parts_of_characters_do_not_collide() -> None:
    decoder, parts = fallback(), bytes_as("\u9002\u5408")
    choice = TextChoice(0, 9, TokenTexts(decoder), decoder.new_detokenizer())
    (item,) = choice.feed(delta(parts[:1], *parts[1:]))
    (probs,) = item["logprobs"]["top_logprobs"]
    assert probs == {
        "bytes:\\xe9": -1.0, "bytes:\\x80": -2.0, "bytes:\\x82": -3.0,
        "bytes:\\xe5": -4.0, "bytes:\\x90": -5.0, "bytes:\\x88": -6.0,
    }  # fmt: skip


def test_tokens_with_one_text_are_told_apart() -> None:
    """The one that was written has the text, as in ``tokens``."""
    decoder = fallback()
    spelt, plain = decoder.tokenizer.convert_tokens_to_ids(["<0x61>", "a"])
    for own, other in ((spelt, plain), (plain, spelt)):
        choice = TextChoice(0, 2, TokenTexts(decoder), decoder.new_detokenizer())
        (item,) = choice.feed(delta([own], other))
        found = item["logprobs"]
        assert found["tokens"] == ["a"]
        assert found["top_logprobs"] == [{"a": -1.0, f"token_id:{other}": -2.0}]


def test_chats_have_the_bytes_of_parts() -> None:
    decoder, parts = fallback(), bytes_as("\U0001f642")
    choice = ChatChoice(0, 1, TokenTexts(decoder))
    (item,) = choice.feed(delta(parts))
    content = item["logprobs"]["content"]
    assert [token["token"] for token in content] == ["\\xf0", "\\x9f", "\\x99", "\\x82"]
    raw = [byte for token in content for byte in token["bytes"]]
    assert bytes(raw).decode() == "\U0001f642"
    assert content[0]["top_logprobs"][0]["bytes"] == [0xF0]


def test_of_two_that_are_equally_probable_as_many_are_told_as_were_asked_for() -> None:
    logprobs = {5: Logprob(-0.7, 1), 6: Logprob(-0.7, 1), 7: Logprob(-3.0, 3)}
    assert len(_ranked(logprobs, 1, None)) == 1
    assert [token for token, _ in _ranked(logprobs, 1, 7)] == [5, 7]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in BY_NEIGHBOUR])
def test_bytes_of_tokens_joined_are_the_bytes_of_the_text(family: str) -> None:
    tokenizer = FAMILIES[family]()
    decoder = TextDecoder(tokenizer)
    texts = TokenTexts(decoder)
    for text in ("a dog \u00e9 \u65e5\u672c", "caf\u00e9 365"):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        if tokenizer.unk_token_id in ids:
            continue
        found = [texts.bytes_of(token) for token in ids]
        assert None not in found
        said = bytes(byte for part in found if part for byte in part).decode()
        shown = decoder.text(ids, skip_special_tokens=False, continues=True)
        assert said == shown


@pytest.mark.parametrize("family", FAMILIES)
def test_no_token_is_written_as_a_replacement_character(family: str) -> None:
    texts = TokenTexts(TextDecoder(FAMILIES[family]()))
    for token in range(len(FAMILIES[family]())):
        assert UNFINISHED not in texts.in_completion(token)
        assert texts.bytes_of(token) is not None


def test_a_replacement_character_is_one() -> None:
    decoder = TextDecoder(FAMILIES["byte-level BPE"]())
    token = decoder.tokenizer.convert_tokens_to_ids("\u00ef")  # the first byte of U+FFFD
    assert TokenTexts(decoder).in_completion(token) == "bytes:\\xef"
    assert TokenTexts(decoder).bytes_of(token) == [0xEF]


def test_without_a_tokenizer_tokens_have_numbers() -> None:
    texts = TokenTexts(None)
    assert (texts.in_completion(7), texts.in_chat(7), texts.bytes_of(7)) == (
        "token_id:7", "token_id:7", None,
    )  # fmt: skip
    choice = TextChoice(0, 2, texts, None)
    (item,) = choice.feed(delta([7], 8))
    assert item["logprobs"]["top_logprobs"] == [{"token_id:7": -1.0, "token_id:8": -2.0}]


def test_a_server_reports_as_many_as_were_asked_for() -> None:
    """Every token of this model is a byte, and these are all parts of characters."""
    parts = ids_of("\u65e5\u9002\u5408")
    sampled = {"allowed_token_ids": parts, "temperature": 1, "seed": 2}
    body: dict[str, Any] = {"max_tokens": 6, **sampled}
    with running(text_decoder("none")) as url:
        _, answer, _ = call(url, "/v1/completions", {"prompt": "go:", "logprobs": 5, **body})
        (choice,) = answer["choices"]
        for token, probs in zip(
            choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True
        ):
            assert token in probs
            assert len(probs) in (5, 6)
            assert list(probs.values()) == sorted(probs.values(), reverse=True)
        _, shown, _ = call(url, "/detokenize", {"tokens": parts[:4]})
        assert shown["prompt"] == "\u65e5\ufffd"
