"""The tokenizer of a vocabulary of sentencepiece's kind, read from a file as llama.cpp reads it.

Its tokens are written as they are in a text, with a mark for a space. How spaces are marked differs
from family to family, and a file does not say it: transformers' tokenizers of the families know.
llama.cpp marks one space more in front of a text that begins with a space, and behind a special
token in a text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tokenizers import AddedToken, Tokenizer, normalizers
from transformers import GemmaTokenizer, LlamaTokenizer, T5Tokenizer
from transformers.tokenization_utils_base import generate_merges

from outpace.targets.hf.gguf.bytelevel import CONTROL, USER_DEFINED

SPACE = "\u2581"
"""What stands for a space."""
BLANKS = 100
"""Tokens that stand for gaps in a text of T5's."""

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
    # Those of other types were added by transformers, which knows them by their texts.
    backend.add_special_tokens([_whole(token, True) for token, own in typed if own == CONTROL])
    known = backend.get_vocab()
    plain = [token for token, own in typed if own == USER_DEFINED and token in known]
    backend.add_tokens([_whole(token, False) for token in plain])
    return backend


def _whole(text: str, special: bool) -> AddedToken:
    return AddedToken(text, normalized=False, special=special)


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
    backend: Tokenizer = tokenizer(vocab=vocabulary, merges=merges).backend_tokenizer
    return backend


def _of_phi3(described: Described) -> Tokenizer:
    """Phi-3 puts its mark in front of a text that begins with a space, too."""
    backend = _pieces(described)
    changes = [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
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
