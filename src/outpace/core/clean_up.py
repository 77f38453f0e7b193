"""Decoded text without the spaces that WordPiece puts in front of punctuation, as it grows.

Tokenizers with ``clean_up_tokenization_spaces`` take such spaces out of the whole text after they
have decoded it: "it ' s ." becomes "it's.". So a later token changes text that was decoded before
it, and a text that grows has to hold back what may still change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

REMOVED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
"""What transformers replaces, one after the other, by the same without its spaces."""

MARKS = ".,?!"
SPELT = ("{}", "\u0120{}", "\u2581{}")
"""How vocabularies write a punctuation mark, alone and with a space in front of it."""


Clean = Callable[[str], str]
"""Cleans up the spaces of a text."""


def cleaner_of(tokenizer: Any) -> Clean | None:
    """Returns what cleans up the spaces of the texts that a tokenizer decodes; None for one that
    leaves them.

    Its ``clean_up_tokenization_spaces`` does not say it alone: transformers ignores that for BPE.
    """
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return None
    names = [spelt.format(mark) for mark in MARKS for spelt in SPELT]
    tokens = [token for token in tokenizer.convert_tokens_to_ids(names) if token is not None]
    cleans = any(
        tokenizer.decode([token, token])
        != tokenizer.decode([token, token], clean_up_tokenization_spaces=False)
        for token in dict.fromkeys(tokens)
    )
    clean: Clean = tokenizer.clean_up_tokenization
    return clean if cleans else None


class CleanUp:
    """The cleaned text of a growing one, piece by piece.

    Joined together, the pieces are what the tokenizer makes of the whole text.
    """

    def __init__(self, clean: Clean) -> None:
        self._clean = clean
        self._held = ""

    @property
    def holds(self) -> bool:
        """Whether text is held back, because more text may change it."""
        return bool(self._held)

    def feed(self, piece: str) -> str:
        """Returns what is certain of the cleaned text, after what was returned before."""
        text = self._held + piece
        end = len(text)
        while end and not _splits(text[:end]):
            end = len(text[: max(text.rfind(" ", 0, end), 0)].rstrip(" "))
        self._held = text[end:]
        return self._clean(text[:end])

    def finish(self) -> str:
        """Returns the rest of the cleaned text."""
        rest, self._held = self._held, ""
        return self._clean(rest)


def _splits(text: str) -> bool:
    """Whether whatever follows a text is cleaned up by itself: at no step the text ends with the
    beginning of what is replaced next."""
    for removed in REMOVED:
        if any(text.endswith(removed[:length]) for length in range(1, len(removed))):
            return False
        text = text.replace(removed, removed.replace(" ", ""))
    return True
