"""Token ids to text and to bytes, by one tokenizer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from typing import Any

from outpace.core.anchors import anchor_of, decoded
from outpace.core.clean_up import cleans
from outpace.core.detokenizer import UNFINISHED, Detokenizer
from outpace.core.special_tokens import Showing
from outpace.core.token_bytes import byte_level, named_byte


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
