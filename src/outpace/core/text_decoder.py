"""Token ids to text and to bytes, by one tokenizer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any

from outpace.core.anchors import anchor_of, decoded
from outpace.core.clean_up import cleans
from outpace.core.detokenizer import UNFINISHED, Detokenizer
from outpace.core.special_tokens import Showing
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
        self._cleans = cleans(tokenizer)

    def showing_all_but(self, hidden: Collection[int]) -> TextDecoder:
        """Returns a decoder whose texts leave out only these special tokens."""
        found = copy(self)
        found.tokenizer = Showing(self.tokenizer, hidden)
        return found

    def growing(self, skip_special_tokens: bool = True, continues: bool = False) -> Detokenizer:
        """Returns the empty text of a sequence that grows. continues: whether it goes on from
        another text, blanks included; else it begins anew."""
        behind = self.anchor if continues else ()
        return Detokenizer(self.tokenizer, skip_special_tokens, behind, self._cleans)

    def text(
        self, ids: Sequence[int], skip_special_tokens: bool = True, continues: bool = False
    ) -> str:
        """Returns the text of a whole sequence, as `growing` ends with it."""
        growing = self.growing(skip_special_tokens, continues)
        growing.extend(ids)
        growing.finish()
        return growing.text

    def token(self, token: int) -> str:
        """Returns the text that a token, special or not, has inside a text, as behind itself: at
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
        found = {}
        for stop in stops:
            if stop in self._special:
                found[self._special[stop]] = stop
                continue
            names = (name for name in self._special if len(name) >= MARKUP)
            inside = next((name for name in names if name in stop), None)
            if inside is not None:
                raise ParamsError(
                    f"stop holds {stop!r}, where {inside!r} is a special token, which texts leave "
                    f"out: give {inside!r} by itself, or skip_special_tokens=False."
                ).about("stop")
        return found

    @cached_property
    def _special(self) -> Mapping[str, int]:
        """The tokens that are left out of texts, by their names."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        names = {entry.content: token for token, entry in added.items() if entry.special}
        known = zip(
            getattr(self.tokenizer, "all_special_tokens", ()),
            getattr(self.tokenizer, "all_special_ids", ()),
            strict=True,
        )
        return {name: token for name, token in {**dict(known), **names}.items() if name}
