"""Tokens to the text that goes on from another one, not to one that begins anew.

Tokenizers of Llama 2's kind put a blank before every text, and drop the blank at the beginning of
whatever they decode. So the token for " cat" alone decodes to "cat". WordPiece puts blanks between
the tokens that it decodes. Where either is so, a text that goes on is decoded after an anchor,
some tokens that are always the same, and the anchor's text is cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

WORDS = ("a", "0", ".")
"""What an anchor may say: the first of them that the tokenizer knows is taken."""


def anchor_of(tokenizer: Any) -> tuple[int, ...]:
    """Returns the anchor for a tokenizer; () for one that drops no blank, and for none."""
    if not hasattr(tokenizer, "convert_ids_to_tokens"):
        return ()
    for word in WORDS:
        text = f"{word} {word}"
        ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        if decoded(tokenizer, ids) == text:
            return _dropping(tokenizer, ids, word)
    return ()


def _dropping(tokenizer: Any, ids: list[int], word: str) -> tuple[int, ...]:
    """Returns the tokens of the first of two words, if the blank after it is dropped where the
    second word is decoded alone."""
    for place in range(1, len(ids)):
        if decoded(tokenizer, ids[:place]) == decoded(tokenizer, ids[place:]) == word:
            return tuple(ids[:place])
    return ()


def decoded(
    tokenizer: Any, ids: Sequence[int], skip_special_tokens: bool = False, **options: bool
) -> str:
    """Returns what a tokenizer decodes tokens to. options: further ones of its ``decode``."""
    text: str = tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens, **options)
    return text
