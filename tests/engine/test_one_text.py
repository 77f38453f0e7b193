"""An answer is the same string streamed, whole, and with a stop string, wherever it is cut."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from outpace.core.clean_up import cleaner_of
from outpace.core.detokenizer import UNFINISHED
from outpace.core.logits_pipeline import RowOptions
from outpace.core.params import SamplingParams
from outpace.core.text_decoder import TextDecoder
from outpace.core.token_bytes import byte_alphabet
from outpace.engine.request import EngineRequest

from .tokenizers_made import CONTRACTIONS, FAMILIES, LINES, wordpiece

WORDS = [
    "it", "'", "s", ".", "is", "n't", "n", "isn't", "'m", "'ve", "'re", "v", "re", "!", "?", ",",
    "the", "dog", "  ", "\u00e9", "\u65e5\u672c", "\U0001f642", "(", "365", " ' ", "a",
]  # fmt: skip


@cache
def decoder(family: str) -> TextDecoder:
    return TextDecoder(FAMILIES[family]())


def made(family: str, tokens: int, streaming: bool = False, **options: Any) -> EngineRequest:
    """Returns a request that ends after this many tokens."""
    continues = options.pop("continues", False)
    params = SamplingParams(**options).resolve({})
    return EngineRequest(
        [1], RowOptions(params), seed=0, max_tokens=tokens, decoder=decoder(family),
        streaming=streaming, continues=continues,
    )  # fmt: skip


def whole(family: str, ids: list[int], **options: Any) -> str:
    request = made(family, len(ids), **options)
    request.extend(ids)
    return request.text


def streamed(family: str, ids: list[int], at_once: int, **options: Any) -> str:
    request, pieces = made(family, len(ids), streaming=True, **options), []
    for place in range(0, len(ids), at_once):
        request.extend(ids[place : place + at_once])
        pieces.append(request.new_text())
        assert request.text.startswith("".join(pieces))
    assert request.finished
    return "".join(pieces)


def check(family: str, ids: list[int], **options: Any) -> str:
    """Returns the answer, after looking whether all ways to get it give the same one."""
    text = whole(family, ids, **options)
    assert whole(family, ids, stop="never said", **options) == text
    for at_once in (1, 3):
        assert streamed(family, ids, at_once, **options) == text
        assert streamed(family, ids, at_once, stop=["never said"], **options) == text
    return text


def spelt(family: str, text: str) -> list[int]:
    ids: list[int] = FAMILIES[family]()(text, add_special_tokens=False).input_ids
    return ids


def real_texts() -> Iterator[str]:
    yield from [*LINES[: len(LINES) // 3], *CONTRACTIONS[:2]]
    rng = random.Random(3)
    for _ in range(7):
        yield " ".join(rng.choices(WORDS, k=8))
        yield "".join(rng.choices(WORDS, k=8))


@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_that_is_cut_at_any_token_is_one_string(family: str, continues: bool) -> None:
    """It is what the tokenizer decodes it to; where it is cut inside a character, it has all
    complete ones."""
    tokenizer, behind = FAMILIES[family](), decoder(family).anchor if continues else ()
    begin = len(tokenizer.decode(behind))

    def of_tokenizer(ids: list[int]) -> str:
        return str(tokenizer.decode([*behind, *ids], skip_special_tokens=True)[begin:])

    for line in real_texts():
        ids = spelt(family, line)
        uncut = of_tokenizer(ids)
        complete = ""
        for end in range(1, len(ids) + 1):
            text = check(family, ids[:end], continues=continues)
            known = of_tokenizer(ids[:end])
            if UNFINISHED not in known:
                assert text == known
                complete = known
            else:
                assert uncut.startswith(text.rstrip(UNFINISHED))
                assert text.startswith(complete)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_any_tokens_are_one_string(family: str, skip: bool) -> None:
    """Tokens as a model with a high temperature draws them: bytes that belong to no character,
    parts of words after nothing, special tokens. Where the tokenizer finds no broken byte, the
    text is what it decodes all of them to."""
    tokenizer, rng = FAMILIES[family](), random.Random(11)
    size = len(tokenizer)
    broken = [token for token in range(size) if UNFINISHED in tokenizer.decode([token])]
    for _ in range(120):
        ids = [
            rng.choice(broken) if broken and rng.random() < 0.5 else rng.randrange(size)
            for _ in range(rng.randint(1, 24))
        ]
        text = check(family, ids, skip_special_tokens=skip)
        known = tokenizer.decode(ids, skip_special_tokens=skip)
        if UNFINISHED not in known:
            assert text == known


@pytest.mark.parametrize("family", FAMILIES)
def test_special_tokens_that_are_shown_are_in_streams_and_whole_texts(family: str) -> None:
    """And no others, as the tags of tool calls are where these are special."""
    tokenizer = FAMILIES[family]()
    hidden = set(tokenizer.all_special_ids) - {tokenizer.eos_token_id}
    ids = [*spelt(family, "the dog"), tokenizer.eos_token_id, *spelt(family, "it's. the dog")]
    ids += sorted(hidden)
    showing = decoder(family).with_special_tokens([tokenizer.eos_token])
    text, growing = showing.text(ids), showing.new_detokenizer()
    for token in ids:
        growing.push(token)
    growing.finish()
    assert growing.text == text
    assert text == tokenizer.decode([token for token in ids if token not in hidden])
    assert tokenizer.eos_token in text
    assert showing.is_special(tokenizer.eos_token) is False


@pytest.mark.parametrize("family", ["byte-level BPE", "byte fallback", "Unigram with bytes"])
def test_bytes_of_no_character_take_no_character_along(family: str) -> None:
    """Every complete character comes out, wherever a run of bytes breaks off or begins anew."""
    tokenizer, rng = FAMILIES[family](), random.Random(5)
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    fallback = "<0xE6>" in names
    letters = ["\u65e5", "\u672c", "\U0001f642", "\u00e9", "A", " "]
    broken = [b"\xe6\x97", b"\xff", b"\xf0\x9f", b"\x80"]
    raw = {
        byte: tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>" if fallback else letter)
        for letter, byte in byte_alphabet().items()
    }
    for _ in range(100):
        parts = [rng.choice([*letters, *broken]) for _ in range(5)]
        sent = [b"a", *(part.encode() if isinstance(part, str) else part for part in parts)]
        ids = [raw[byte] for part in sent for byte in part]
        text = check(family, ids)
        expected = b"".join(sent).decode(errors="replace")
        assert text.replace(UNFINISHED, "") == expected.replace(UNFINISHED, "")
    assert check(family, [raw[byte] for byte in "\u65e5\u672c".encode() + b"\xe6"]) == (
        "\u65e5\u672c\ufffd"
    )


# -- spaces that are cleaned up --------------------------------------------------------------------


def test_only_tokenizers_that_clean_up_are_taken_for_such() -> None:
    found = {family for family in FAMILIES if cleaner_of(FAMILIES[family]()) is not None}
    assert found == {"WordPiece, cleaned up"}


def test_contractions_are_streamed_as_they_end() -> None:
    ids = spelt("WordPiece, cleaned up", "it's. isn't it")
    assert wordpiece().decode(ids, clean_up_tokenization_spaces=False).startswith("it ' s .")
    assert streamed("WordPiece, cleaned up", ids, 1) == wordpiece().decode(ids)
    assert streamed("WordPiece, cleaned up", ids, 1).startswith("it's.")


def test_a_stop_string_is_found_in_the_cleaned_text() -> None:
    ids = spelt("WordPiece, cleaned up", "it's. the dog")
    request = made("WordPiece, cleaned up", len(ids), stop="it's.")
    request.extend(ids)
    assert (request.text, request.stop_reason) == ("", "it's.")


def test_a_stop_string_is_found_in_what_is_held_back_at_the_end() -> None:
    """A blank and an "n" may still become "n't"."""
    ids = spelt("WordPiece, cleaned up", "a n")
    request = made("WordPiece, cleaned up", len(ids), stop="n")
    request.extend(ids)
    assert (request.text, request.finish_reason, request.stop_reason) == ("a ", "stop", "n")
