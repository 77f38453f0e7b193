"""The tokenizer of a byte-level vocabulary, read from a file as llama.cpp reads it.

Ordinary tokens are spelt in GPT-2's alphabet, a character for each byte. Tokens that were added to
a vocabulary stand in the same list, but as they are in a text, and only their types tell that they
are not spelt: `<|im_start|>` is the same either way, DeepSeek's names of roles and a German word
are not. llama.cpp finds them whole in a text, and writes them as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers.convert_slow_tokenizer import bytes_to_unicode

from outpace.targets.hf.gguf.splits import expressions_of

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""Types of tokens that are in a text as they are in the file."""

WHOLE_WORDS = frozenset(
    {
        "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
        "jina-v5-nano", "tekken", "glm4", "glm5", "minicpm5", "youtu", "granite-embed-multi-97m",
    }
)  # fmt: skip
"""Ways to split a text whose words are one token where there is one, whether or not the merges lead
to it. The list is llama.cpp's."""

_table: Any = bytes_to_unicode
SPELLING: dict[int, str] = _table()
"""The character that stands for a byte."""
ALPHABET = frozenset(SPELLING.values())

MARK = "\U0010ffff"
"""No character, in Unicode's own words: it stands in no text."""


def byte_level(
    tokens: Sequence[str],
    types: Sequence[int],
    merges: Iterable[str],
    split: str | None,
    named: Iterable[int],
) -> Tokenizer:
    """Returns the tokenizer of a vocabulary whose every token keeps its place in the list.

    types: of the tokens; those behind its end are ordinary. split: how texts are split before
    merging, by its name in the file. named: special tokens, which are whole in a text whatever
    their type is, unless they are spelt. Raises ``ValueError`` for merges that make no sense.
    """
    whole = {n for n, kind in enumerate(types) if kind in (UNKNOWN, CONTROL, USER_DEFINED)}
    whole |= {number for number in named if not ALPHABET.issuperset(tokens[number])}
    spelt = {_spelt(text): n for n, text in enumerate(tokens) if n not in whole}
    added = {text: n for n in sorted(whole) if _is_free(text := tokens[n], spelt)}
    made: Any = BPE
    backend = Tokenizer(
        made(
            vocab=spelt | added,
            merges=[_pair(merge) for merge in merges],
            ignore_merges=split in WHOLE_WORDS,
        )
    )
    backend.pre_tokenizer = splitter(split)
    backend.decoder = _decoder(added)
    plain = {text for text, n in added.items() if n < len(types) and types[n] == USER_DEFINED}
    backend.add_special_tokens([_whole(text, True) for text in added if text not in plain])
    backend.add_tokens([_whole(text, False) for text in added if text in plain])
    return backend


def _spelt(token: str) -> str:
    """A token in the alphabet, also where a file should have spelt it and did not."""
    return token if ALPHABET.issuperset(token) else _in_bytes(token)


def _in_bytes(text: str) -> str:
    return "".join(SPELLING[byte] for byte in text.encode())


def _is_free(text: str, spelt: dict[str, int]) -> bool:
    """Whether no ordinary token is written like this and means other bytes: a tokenizer has one
    token of a name. Such a one is not added, and its text is spelt by the others."""
    return text not in spelt or _in_bytes(text) == text


def _pair(merge: str) -> tuple[str, str]:
    first, second = merge.split(" ")
    return first, second


def _whole(text: str, special: bool) -> AddedToken:
    return AddedToken(text, normalized=False, special=special)


def splitter(split: str | None) -> pre_tokenizers.PreTokenizer:
    """Returns what splits a text before merging, and spells its pieces."""
    found = [pre_tokenizers.Split(Regex(each), "isolated") for each in expressions_of(split)]
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*found, spelling])


def _decoder(added: Iterable[str]) -> decoders.Decoder:
    """Reads tokens as spelt, but for those that were added. tokenizers' decoder leaves a token
    alone that has a character outside the alphabet: others are given one, which is taken out
    again."""
    spelling = decoders.ByteLevel()
    like = [text for text in added if ALPHABET.issuperset(text) and _in_bytes(text) != text]
    if not like:
        return spelling
    texts = "|".join(map(re.escape, like))
    marking = decoders.Replace(Regex(rf"\A(?=(?:{texts})\z)"), MARK)
    return decoders.Sequence([marking, spelling, decoders.Replace(MARK, "")])
