"""Token ids to text and to bytes, by one tokenizer."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from outpace.core.anchors import anchor_of, decoded
from outpace.core.clean_up import cleaner_of
from outpace.core.detokenizer import UNFINISHED, Detokenizer
from outpace.core.special_tokens import SpecialTokenFilter, special_tokens
from outpace.core.token_bytes import byte_level, named_byte
from outpace.errors import ParamsError

MARKUP = 3
"""Characters from which on the name of a special token is no ordinary text: some vocabularies call
a question mark or a blank their unknown token."""


class TextDecoder:
    """Decodes whole texts, texts that grow, and single tokens.

    A whole text is what the growing one is in the end (`Detokenizer`), so that an answer is the
    same string whether it is streamed or not.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.anchor = anchor_of(tokenizer)
        self._clean = cleaner_of(tokenizer)
        self._special = special_tokens(tokenizer)  # those that texts leave out
        self._of_texts = tokenizer  # what decodes texts

    def with_special_tokens(self, words: Collection[str]) -> TextDecoder:
        """Returns the same for texts that hold these special tokens, although they leave out the
        others."""
        made = copy.copy(self)
        made._special = {token: word for token, word in self._special.items() if word not in words}
        made._of_texts = SpecialTokenFilter(self.tokenizer, made._special)
        return made

    def is_special(self, word: str) -> bool:
        """Returns whether a word is a special token, which texts leave out."""
        return word in self._special.values()

    def new_detokenizer(
        self, skip_special_tokens: bool = True, continues: bool = False
    ) -> Detokenizer:
        """Returns the empty text of a sequence that grows. continues: whether it goes on from
        another text, blanks included; else it begins anew."""
        after = self.anchor if continues else ()
        return Detokenizer(self._of_texts, skip_special_tokens, after, self._clean)

    def text(
        self, ids: Sequence[int], skip_special_tokens: bool = True, continues: bool = False
    ) -> str:
        """Returns the text of a whole sequence, as `new_detokenizer` ends with it."""
        detokenizer = self.new_detokenizer(skip_special_tokens, continues)
        detokenizer.extend(ids)
        detokenizer.finish()
        return detokenizer.text

    def token(self, token: int) -> str:
        """Returns the text that a token, special or not, has inside a text, as after itself: at
        the beginning of a text some tokenizers drop its blank."""
        alone = decoded(self.tokenizer, [token])
        return decoded(self.tokenizer, [token, token])[len(alone) :]

    def token_bytes(self, token: int) -> bytes | None:
        """Returns the bytes that a token stands for inside a text: those of its text, and for a
        part of a character the part's. None for such a part where the vocabulary does not say it.
        """
        text = self.token(token)
        if UNFINISHED not in text:
            return text.encode()
        if not hasattr(self.tokenizer, "convert_ids_to_tokens"):
            return None
        name: str | bytes = self.tokenizer.convert_ids_to_tokens([token])[0]
        if isinstance(name, bytes):  # as tokenizers in Python may have it
            return name
        if UNFINISHED in name:  # the character itself
            return text.encode()
        return named_byte(name) or byte_level(name)

    def named_by(self, stops: Iterable[str]) -> dict[int, str]:
        """Returns the special tokens that stop strings name, each with its string.

        Texts leave special tokens out, so that no string could be found there. Raises
        ``ParamsError`` for a string in which one stands among other text.
        """
        numbers = {name: token for token, name in self._special.items()}
        found = {}
        for stop in stops:
            if stop in numbers:
                found[numbers[stop]] = stop
                continue
            names = (name for name in numbers if len(name) >= MARKUP)
            inside = next((name for name in names if name in stop), None)
            if inside is not None:
                raise ParamsError(
                    f"stop holds {stop!r}, where {inside!r} is a special token, which texts leave "
                    f"out: give {inside!r} by itself, or skip_special_tokens=False."
                ).about("stop")
        return found
