"""Texts of tokens as they come, whole, and one by one, for tokenizers of all kinds."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from outpace import LLM, SamplingParams
from outpace.core.anchors import anchor_of, decoded
from outpace.core.detokenizer import UNFINISHED, Detokenizer
from outpace.core.text_decoder import TextDecoder
from targets.families import build

from .tokenizers_made import KINDS, byte_level, pieces

ALL = {**KINDS, "byte_level": byte_level}


def pushed(tokenizer: Any, ids: list[int], behind: tuple[int, ...] = ()) -> str:
    """Returns the text of tokens that come one by one; nothing shown may be taken back."""
    growing = Detokenizer(tokenizer, after=behind)
    for token in ids:
        shown = growing.text
        growing.push(token)
        assert growing.text.startswith(shown)
    growing.finish()
    return growing.text


def test_bytes_in_any_order_are_what_they_are_together() -> None:
    tokenizer, rng = byte_level(), random.Random(1)
    size = len(tokenizer)
    broken = [token for token in range(size) if UNFINISHED in tokenizer.decode([token])]
    for _ in range(20_000):
        ids = [
            rng.choice(broken) if rng.random() < 0.7 else rng.randrange(size)
            for _ in range(rng.randint(1, 10))
        ]
        assert pushed(tokenizer, ids) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("at_once", [1, 3, 20])
def test_long_runs_of_bytes_are_what_they_are_together(at_once: int) -> None:
    tokenizer, rng = byte_level(), random.Random(4)
    broken = [t for t in range(len(tokenizer)) if UNFINISHED in tokenizer.decode([t])]
    lead = tokenizer("\u65e5", add_special_tokens=False).input_ids
    for _ in range(200):
        ids = [token for _ in range(rng.randint(20, 60)) for token in (rng.choice(broken), *lead)]
        ids = ids if rng.random() < 0.5 else rng.choices(broken, k=len(ids))
        growing = Detokenizer(tokenizer)
        for place in range(0, len(ids), at_once):
            growing.extend(ids[place : place + at_once])
        growing.finish()
        assert growing.text == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("at_once", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("letter", ["\u00e9", "\u65e5", "\U0001f642"])
def test_characters_come_out_wherever_their_bytes_are_cut(
    kind: str, at_once: int, letter: str
) -> None:
    tokenizer = ALL[kind]()
    ids = tokenizer(f"a {letter * 60} dog", add_special_tokens=False).input_ids
    growing = Detokenizer(tokenizer)
    for place in range(0, len(ids), at_once):
        growing.extend(ids[place : place + at_once])
        assert UNFINISHED not in growing.text
    growing.finish()
    assert growing.text == tokenizer.decode(ids, skip_special_tokens=True)


class Straddling:
    """A tokenizer whose tokens end inside a character: most of them hold the end of one character
    and the beginning of the next."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        begins, ends = "\u65e5".encode()[:2], "\u65e5".encode()[2:]
        parts = (begins, ends + begins, b"\xff")
        return b"".join(parts[i] for i in ids).decode(errors="replace")


def test_tokens_that_all_end_inside_a_character_are_shown() -> None:
    growing = Detokenizer(Straddling())
    for token in [0, *[1] * 200]:
        growing.push(token)
    assert growing.text == "\u65e5" * len(growing.text)
    assert len(growing.text) > 180
    for token in [2] * 40:
        growing.push(token)
    growing.finish()
    assert growing.text == Straddling().decode([0, *[1] * 200, *[2] * 40])


def raw_bytes(tokenizer: Any, ids: list[int]) -> bytes:
    """Returns the bytes that tokens stand for, of a tokenizer that spells in bytes what it has no
    token for."""
    names = tokenizer.convert_ids_to_tokens(ids)
    parts = [
        bytes([int(name[3:5], 16)]) if name.startswith("<0x") else name.encode() for name in names
    ]
    return b"".join(parts).replace("\u2581".encode(), b" ")


def assert_same_bytes(text: str, raw: bytes) -> None:
    """Every byte is in the text once: in its character, or as U+FFFD."""
    place = 0
    for letter in text:
        size = 1 if letter == UNFINISHED else len(letter.encode())
        assert letter in (UNFINISHED, raw[place : place + size].decode(errors="replace"))
        place += size
    assert place == len(raw)


@pytest.mark.parametrize("kind", ALL)
def test_runs_of_bytes_among_other_tokens_lose_and_repeat_nothing(kind: str) -> None:
    tokenizer, rng = ALL[kind](), random.Random(7)
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    spelt = {int(name[3:5], 16): token for token, name in enumerate(names) if name[:3] == "<0x"}
    special = set(tokenizer.all_special_ids)
    ordinary = [t for t in range(len(names)) if t not in special | set(spelt.values())]
    broken = [t for t in ordinary if UNFINISHED in tokenizer.decode([t])]
    letters = ["\u65e5", "\u65e5\u65e5", "\u00e9", "\U0001f642", " "]
    runs = [*(letter.encode() for letter in letters), b"\xff", b"\x80", b"\xe6\x97"]
    for _ in range(1500):
        ids = tokenizer.convert_tokens_to_ids(["a"])  # no blank is dropped after it
        for _ in range(rng.randint(1, 16)):
            if rng.random() < 0.2:
                ids += rng.choices(ordinary, k=rng.randint(1, 3))
            elif spelt:
                ids += [spelt[byte] for byte in rng.choice(runs)]
            else:
                ids += rng.choices(broken, k=rng.randint(1, 3))
        growing, at_once = Detokenizer(tokenizer), rng.randint(1, 20)
        for place in range(0, len(ids), at_once):
            shown = growing.text
            growing.extend(ids[place : place + at_once])
            assert growing.text.startswith(shown)
        growing.finish()
        if spelt:
            assert_same_bytes(growing.text, raw_bytes(tokenizer, ids))
            assert_same_bytes(tokenizer.decode(ids), raw_bytes(tokenizer, ids))
        else:
            assert growing.text == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["pieces", "unigram"])
@pytest.mark.parametrize("at_once", [1, 5, 26])
def test_every_broken_byte_is_shown(kind: str, at_once: int) -> None:
    tokenizer = ALL[kind]()
    ids = tokenizer.convert_tokens_to_ids(["<0xFF>", *["<0xFE>"] * 25])
    growing = Detokenizer(tokenizer)
    for place in range(0, len(ids), at_once):
        growing.extend(ids[place : place + at_once])
    growing.finish()
    assert growing.text == UNFINISHED * 26 == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["pieces", "byte_level"])
def test_a_character_that_the_prompt_begins_comes_out_once(kind: str) -> None:
    tokenizer = ALL[kind]()
    spelt = ["<0xE6>", "<0x97>", "<0xA5>"] if kind == "pieces" else ["\u00e6", "\u0139", "\u00a5"]
    ids = tokenizer.convert_tokens_to_ids(spelt)
    assert tokenizer.decode(ids) == "\u65e5"
    dog = tokenizer(" dog", add_special_tokens=False).input_ids[-1:]
    growing = Detokenizer(tokenizer, after=ids[:2])
    for token in [*ids[2:], *dog]:
        growing.push(token)
    assert growing.text == "\u65e5" + tokenizer.decode([*ids, *dog])[1:]


@pytest.mark.parametrize("kind", ["byte_level", "pieces"])
def test_a_long_run_of_broken_bytes_takes_no_longer_at_its_end(kind: str) -> None:
    inside = ALL[kind]()
    counting = Counting(inside)
    broken = [t for t in range(len(inside)) if UNFINISHED in inside.decode([t])]
    growing = Detokenizer(counting)
    for place in range(2000):
        growing.push(broken[place % 7])
    growing.finish()
    assert counting.tokens < 200_000
    assert growing.text == inside.decode([broken[place % 7] for place in range(2000)])


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("anchored", [False, True])
def test_texts_come_out_whole(kind: str, anchored: bool) -> None:
    tokenizer = ALL[kind]()
    behind = anchor_of(tokenizer) if anchored else ()
    rng = random.Random(2)
    for _ in range(300):
        letters = rng.choices(["the", " ", "  ", "dog", "\u00e9", "\u65e5", "\U0001f642", "."], k=9)
        ids = tokenizer("".join(letters), add_special_tokens=False).input_ids
        ids.insert(rng.randrange(len(ids)), tokenizer.eos_token_id)
        before = decoded(tokenizer, behind, True)
        whole = decoded(tokenizer, [*behind, *ids], True)
        assert pushed(tokenizer, ids, behind) == whole[len(before) :]


class Counting:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, inside: Any) -> None:
        self._inside = inside
        self.tokens = 0

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        self.tokens += len(ids)
        return str(self._inside.decode(ids, skip_special_tokens=skip_special_tokens))


@pytest.mark.parametrize("before", ["", " ", "the dog"])
@pytest.mark.parametrize("kind", ALL)
def test_tokens_without_text_do_not_make_later_ones_dearer(kind: str, before: str) -> None:
    inside = ALL[kind]()
    counting = Counting(inside)
    growing = Detokenizer(counting)
    growing.extend(inside(before, add_special_tokens=False).input_ids)
    for _ in range(1000):
        growing.push(inside.eos_token_id)
    assert counting.tokens < 20_000
    growing.push(inside(" dog", add_special_tokens=False).input_ids[-1])


# -- tokenizers that drop the blank in front of a text ---------------------------------------------


def marked(tokenizer: Any) -> list[int]:
    """Returns the tokens for a blank and what follows it."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return [i for text, i in vocabulary.items() if text[0] in "\u2581\u0120" and len(text) > 1]


@pytest.mark.parametrize("kind", ALL)
def test_a_token_alone_has_the_text_that_it_has_inside_a_text(kind: str) -> None:
    tokenizer = ALL[kind]()
    decoder = TextDecoder(tokenizer)
    assert bool(decoder.anchor) == (kind in ("pieces", "unigram"))
    texts = [decoder.token(token) for token in marked(tokenizer)]
    assert len(texts) > 9
    assert all(text.startswith(" ") for text in texts)
    ids = tokenizer("the little dog", add_special_tokens=False).input_ids
    texts = [decoder.token(token) for token in ids]
    assert "".join(texts).removeprefix(" ") == "the little dog"


def test_what_is_no_tokenizer_of_transformers_has_no_anchor() -> None:
    assert anchor_of(Counting(byte_level())) == ()


@cache
def writer(kind: str) -> LLM:
    tokenizer = ALL[kind]()
    model = build("llama", vocab_size=len(tokenizer))
    return LLM(model, tokenizer=tokenizer, speculative_config={"method": "none"})


def options(**more: Any) -> SamplingParams:
    """Every token of the text has a blank in front of it."""
    wanted = {"max_tokens": 6, "seed": 3, "temperature": 1.0, **more}
    return SamplingParams(allowed_token_ids=marked(pieces()), **wanted)


def test_a_text_goes_on_from_its_prompt() -> None:
    llm = writer("pieces")
    (output,) = llm.generate("the dog", options(logprobs=1))
    whole = llm.tokenizer("the dog", add_special_tokens=False).input_ids + output.token_ids
    assert output.text == llm.tokenizer.decode(whole).removeprefix("the dog")
    assert output.text.startswith(" ")
    assert "".join(chunk.text for chunk in llm.stream("the dog", options())) == output.text
    assert output.logprobs is not None
    pairs = zip(output.token_ids, output.logprobs, strict=True)
    assert "".join(str(probs[token].decoded_token) for token, probs in pairs) == output.text
    assert llm.generate({"prompt": "the dog"}, options())[0].text == output.text
    (cut,) = llm.generate("the dog", options(stop=output.text[:3]))
    assert (cut.text, cut.finish_reason) == ("", "stop")


def test_a_text_behind_token_ids_begins_anew_unless_it_is_said_to_go_on() -> None:
    llm = writer("pieces")
    ids = llm.prompt_ids("the dog")
    goes_on = llm.generate("the dog", options())[0].text
    assert llm.generate([ids], options())[0].text == goes_on.removeprefix(" ")
    assert "".join(chunk.text for chunk in llm.stream(ids, options())) == goes_on.removeprefix(" ")
    for prompt, continues, text in ((ids, True, goes_on), ("the dog", False, goes_on[1:])):
        (request,) = llm.requests(prompt, options(), continues=continues)
        llm.engine.add(request)
        while not request.finished:
            llm.engine.step()
        assert request.text == text


def test_texts_of_other_tokenizers_are_those_of_their_tokens() -> None:
    llm = writer("byte_level")
    for prompt in ("the dog", llm.prompt_ids("the dog")):
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=9, seed=1, temperature=1.0))
        assert output.text == llm.tokenizer.decode(output.token_ids, skip_special_tokens=True)
