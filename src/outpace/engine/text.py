"""Tokens to text as they come: nothing is shown that a later token could still change."""

from __future__ import annotations

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

    def push(self, token: int) -> None:
        """Appends one token."""
        self._ids.append(token)
        before = self._decode(self._ids[self._context : self._shown])
        now = self._decode(self._ids[self._context :])
        if len(now) > len(before) and not now.endswith(UNFINISHED):
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


class StopStrings:
    """Finds the first stop string in a growing text, and what of the text is safe to show.

    >>> stop = StopStrings(("END",), include=False)
    >>> stop.find("so it E", 0), stop.safe("so it E"), stop.find("so it ENDs", 6)
    (None, 6, (6, 'END'))
    """

    def __init__(self, strings: tuple[str, ...], include: bool) -> None:
        self._strings = strings
        self._include = include

    def find(self, text: str, begin: int) -> tuple[int, str] | None:
        """Returns where to cut the text and why, if a stop string ends behind ``begin``.

        Of several, the one that ends first counts.
        """
        found = []
        for string in self._strings:
            at = text.find(string, max(0, begin - len(string) + 1))
            if at >= 0:
                found.append((at + len(string), at, string))
        if not found:
            return None
        end, start, string = min(found)
        return (end if self._include else start), string

    def safe(self, text: str) -> int:
        """Returns how many characters no stop string can swallow any more."""
        longest = max((len(string) for string in self._strings), default=0)
        for begin in range(max(0, len(text) - longest + 1), len(text)):
            if any(string.startswith(text[begin:]) for string in self._strings):
                return begin
        return len(text)
