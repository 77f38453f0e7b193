"""Tokens to text as they come: nothing is shown that a later token could still change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from outpace.core.anchors import decoded

UNFINISHED = "\ufffd"
"""What a tokenizer decodes the first bytes of an unfinished character to."""


class Detokenizer:
    """The text of a growing token sequence.

    ``text`` holds complete characters only; `finish` adds what an unfinished one decodes to.
    """

    def __init__(
        self, tokenizer: Any, skip_special_tokens: bool = True, behind: Sequence[int] = ()
    ) -> None:
        """behind: tokens that the sequence goes on from. Their text is left out."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        # The tokens that were shown last: a piece may depend on the one before it.
        self._context = list(behind)
        self._new: list[int] = []  # tokens behind them, whose text is not in `text` yet
        self._before = self._decode(self._context)
        self._now = self._before  # the text of the context and the new tokens
        self.text = ""
        self.unfinished = False
        """Whether the tokens end in the middle of a character, which is not in ``text`` yet."""

    def push(self, token: int) -> None:
        """Appends one token."""
        self.extend((token,))

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends several tokens."""
        added = list(tokens)
        self._new += added
        earlier, self._now = self._now, self._decode([*self._context, *self._new])
        self.unfinished = self._now.endswith(UNFINISHED)
        if len(self._now) > len(self._before) and not self.unfinished:
            self._show()
        elif self._now == earlier and self._says_nothing(added):
            del self._new[len(self._new) - len(added) :]

    def finish(self) -> None:
        """Shows what is left, however it decodes; a second time it changes nothing."""
        if self._new:
            self._show()

    def _show(self) -> None:
        self.text += self._now[len(self._before) :]
        self._context, self._new = self._new, []
        self._before = self._now = self._decode(self._context)

    def _says_nothing(self, tokens: Sequence[int]) -> bool:
        """Whether tokens have no text anywhere, as special tokens that are skipped: they would only
        make every later step longer. A blank that is dropped at the beginning of a text has one
        where it comes twice."""
        return self._decode([*tokens, *tokens]) == ""

    def _decode(self, ids: Sequence[int]) -> str:
        return decoded(self._tokenizer, ids, self._skip)
