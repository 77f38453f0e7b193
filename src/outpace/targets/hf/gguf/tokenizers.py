"""The tokenizers of byte-level vocabularies and of sentencepiece's kind, read from a file as
llama.cpp reads them.

Byte-level: ordinary tokens are spelt in GPT-2's alphabet, a character for each byte. Tokens that
were added to a vocabulary stand in the same list, but as they are in a text, and only their types
tell that they are not spelt: `<|im_start|>` is the same either way, DeepSeek's names of roles and a
German word are not. llama.cpp finds them whole in a text, and writes them as they are.

Sentencepiece: tokens are written as they are in a text, with a mark for a space. How spaces are
marked differs from family to family, and a file does not say it: transformers' tokenizers of the
families know. llama.cpp marks one space more in front of a text that begins with a space, and after
a special token in a text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import GemmaTokenizer, LlamaTokenizer, T5Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.tokenization_utils_base import generate_merges

from outpace.targets.hf.gguf.pretokenizers import OF_LLAMA3, expressions_of

# -- byte-level vocabularies -----------------------------------------------------------------------


NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Types of tokens: ordinary ones, and those that are in a text as they are in the file."""

WHOLE_WORDS = frozenset(
    {*OF_LLAMA3, "tekken", "glm4", "glm5", "minicpm5", "youtu", "granite-embed-multi-97m"}
)
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

    types: of the tokens; those after its end are ordinary. split: how texts are split before
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


def _whole(text: str, special: bool, strips: bool = False) -> AddedToken:
    """strips: whether it takes the blanks after it."""
    return AddedToken(text, normalized=False, special=special, rstrip=strips)


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


# -- sentencepiece ---------------------------------------------------------------------------------


SPACE = "\u2581"
"""What stands for a space."""
BLANKS = 100
"""Tokens that stand for gaps in a text of T5's."""

USUAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
"""Special tokens as transformers takes them to be in a vocabulary of Llama's kind."""
STRIPPING: Mapping[str, Collection[str]] = {"phi3": ("<unk>", "<s>", "<|endoftext|>")}
"""Architectures whose added tokens take the blanks after them, which no field of a file says, and
the tokens that do not (llama.cpp knows them by the model's name)."""

Described = Mapping[str, Any]
"""What a file says of its tokenizer, by llama.cpp's names."""


def sentencepiece(architecture: str, described: Described) -> Tokenizer:
    """Returns the tokenizer of a vocabulary whose every token keeps its place in the list.

    Raises ``ValueError`` for a kind of tokenizer that is not known here.
    """
    kind = described["model"]
    build = _KINDS.get(kind)
    if kind == "llama":
        build = _OF_FAMILIES.get(architecture, build)
    if build is None:
        raise ValueError(f"there is no reading for tokenizers of the kind {kind!r}")
    backend = build(described)
    typed = list(zip(described["tokens"], described.get("token_type") or (), strict=False))
    stays = STRIPPING.get(architecture) if kind == "llama" else None

    def strips(token: str) -> bool:
        return stays is not None and token not in stays

    # Those of other types were added by transformers, which knows them by their texts.
    whole = [token for token, own in typed if own == CONTROL]
    backend.add_special_tokens([_whole(token, True, strips(token)) for token in whole])
    known = backend.get_vocab()
    plain = [token for token, own in typed if own == USER_DEFINED and token in known]
    backend.add_tokens([_whole(token, False, strips(token)) for token in plain])
    return backend


def _pieces(
    described: Described, tokenizer: Any = LlamaTokenizer, scores: Mapping[str, float] | None = None
) -> Tokenizer:
    """scores: which of two merges comes first, where the file does not list them; its own unless
    given."""
    tokens = described["tokens"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if "merges" in described:
        merges = [tuple(merge.split(" ")) for merge in described["merges"]]
    else:
        given = dict(zip(tokens, described["scores"], strict=False)) if scores is None else scores
        merges = generate_merges(vocabulary, dict(given))
    more: dict[str, Any] = {}
    if tokenizer is LlamaTokenizer:
        typed = dict(zip(tokens, described.get("token_type") or (), strict=False))
        more = {
            name: text if text in vocabulary and typed.get(text) != NORMAL else None
            for name, text in USUAL.items()
        }
        more["add_prefix_space"] = described.get("add_space_prefix") is not False
    backend: Tokenizer = tokenizer(vocab=vocabulary, merges=merges, **more).backend_tokenizer
    return backend


def _of_phi3(described: Described) -> Tokenizer:
    """Phi-3 puts its mark in front of a text that begins with a space, too."""
    backend = _pieces(described)
    changes: list[Any] = [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    if described.get("add_space_prefix") is False:
        del changes[0]
    marking: Any = normalizers.Sequence
    whole: Any = backend
    whole.normalizer, whole.pre_tokenizer = marking(changes), None
    return backend


def _of_gemma(described: Described) -> Tokenizer:
    """Files of Gemma spell runs of spaces as spaces, and merges come in the order of the tokens
    that they make, not in that of the scores."""
    tokens = [
        SPACE * len(token) if " " in token and not token.strip() else token
        for token in described["tokens"]
    ]
    order = {token: -number for number, token in enumerate(tokens)}
    return _pieces({**described, "tokens": tokens}, GemmaTokenizer, order)


def _of_t5(described: Described) -> Tokenizer:
    """T5's tokens have no merges, but chances. A file calls those of gaps otherwise than texts."""
    tokens = list(described["tokens"])
    spare = [n for n, token in enumerate(tokens) if re.fullmatch(r"\[PAD\d+\]", token)]
    for gap, number in enumerate(spare[:BLANKS], 1):
        tokens[number] = f"<extra_id_{BLANKS - gap}>"
    made: Any = T5Tokenizer
    pieces = list(zip(tokens, described["scores"], strict=False))
    backend: Tokenizer = made(vocab=pieces).backend_tokenizer
    return backend


_KINDS: Mapping[str, Callable[[Described], Tokenizer]] = {
    "llama": _pieces,
    "gemma4": partial(_pieces, tokenizer=GemmaTokenizer),
    "t5": _of_t5,
}
_OF_FAMILIES: Mapping[str, Callable[[Described], Tokenizer]] = {
    "gemma": _of_gemma,
    "gemma2": _of_gemma,
    "gemma3": _of_gemma,
    "phi3": _of_phi3,
}
