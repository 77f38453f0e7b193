"""Tokens to text as they come: nothing is shown that a later token could still change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

UNFINISHED = "\ufffd"
"""What a tokenizer decodes the first bytes of an unfinished character to."""


class Detokenizer:
    """The text of a growing token sequence.

    ``text`` holds complete characters only; `finish` adds what an unfinished one decodes to.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._shown = 0  # tokens whose text is in `text`
        self._context = 0  # decode from here, since a piece may depend on the one before it
        self.text = ""
        self.unfinished = False
        """Whether the tokens end in the middle of a character, which is not in ``text`` yet."""

    def push(self, token: int) -> None:
        """Appends one token."""
        self.extend((token,))

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends several tokens."""
        self._ids += tokens
        before = self._decode(self._ids[self._context : self._shown])
        now = self._decode(self._ids[self._context :])
        self.unfinished = now.endswith(UNFINISHED)
        if len(now) > len(before) and not self.unfinished:
            self._show(now[len(before) :])

    def finish(self) -> None:
        """Shows what is left, however it decodes; a second time it changes nothing."""
        if self._shown == len(self._ids):
            return
        before = self._decode(self._ids[self._context : self._shown])
        now = self._decode(self._ids[self._context :])
        self._show(now[len(before) :])

    def _show(self, piece: str) -> None:
        self.text += piece
        self._context, self._shown = self._shown, len(self._ids)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._skip)
        return text
