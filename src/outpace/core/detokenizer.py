"""Tokens to text as they come: nothing is shown that a later token could still change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from outpace.core.anchors import decoded
from outpace.core.clean_up import Clean, CleanUp

UNFINISHED = "\ufffd"
"""What a tokenizer decodes the first bytes of an unfinished character to, and bytes that belong to
no character."""

CHARACTER = 4
"""Bytes of a character, at most, and so tokens that a character is spelt in."""

PATIENCE = 16
"""Tokens that may wait for the end of a character, before some of them are shown."""

LONGEST = 8
"""More tokens than one character takes, which has four bytes at most."""

MOST_PIECES = 64
"""Pieces of which a text is put together, at most."""


class Detokenizer:
    """The text of a growing token sequence: the same whether tokens come one by one or at once.

    ``text`` holds complete characters only; `finish` adds what an unfinished one decodes to. Where
    all bytes of a text belong to characters, the finished text is what the tokenizer decodes the
    whole sequence to. Where some do not, each complete character is there all the same, also among
    tokens that spell single bytes: tokenizers decode a run of these to U+FFFD as a whole.
    """

    def __init__(
        self,
        tokenizer: Any,
        skip_special_tokens: bool = True,
        after: Sequence[int] = (),
        clean: Clean | None = None,
    ) -> None:
        """after: tokens that the sequence goes on from. Their text is left out. clean: what cleans
        up the spaces of the tokenizer's texts (`outpace.core.clean_up.cleaner_of`)."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._clean_up = None if clean is None else CleanUp(clean)
        self._options = {} if clean is None else {"clean_up_tokenization_spaces": False}
        # The tokens that were shown last: a piece may depend on the one before it.
        self._context = list(after)
        self._before = self._decode(self._context)
        """What the context decodes to, without what was not shown yet."""
        self._new: list[int] = []  # tokens after them, whose text was not shown yet
        self._now = self._before  # the text of the context and the new tokens
        self._waiting = ""  # the text of the new tokens
        self._begun = False  # whether some text was shown
        self._shown = [""]  # pieces of the text
        self.unfinished = False
        """Whether the tokens end in the middle of a character, or with spaces that may go, neither
        of which is in ``text`` yet."""

    @property
    def text(self) -> str:
        """What was shown so far. Another thread may ask for it."""
        return "".join(self._shown)

    def push(self, token: int) -> None:
        """Appends one token."""
        self.extend((token,))

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends several tokens."""
        added = list(tokens)
        known, earlier = len(self._new), self._now
        self._new += added
        self._read()
        if len(added) > 1 and UNFINISHED in self._waiting:
            # Which bytes belong to no character is seen where they come one by one.
            del self._new[known:]
            self._read()
            self.extend(added[: len(added) // 2])
            return self.extend(added[len(added) // 2 :])
        ends_inside = self._now.endswith(UNFINISHED)
        if self._waiting and not ends_inside:
            self._show(len(self._new), self._waiting)
        elif self._now == earlier and self._says_nothing(added):
            del self._new[known:]
        elif self._ends_a_character():
            ends_inside = False
        elif len(self._new) > PATIENCE:
            self._show_some()
        self.unfinished = ends_inside or (self._clean_up is not None and self._clean_up.holds)
        return None

    def finish(self) -> None:
        """Shows what is left, however it decodes; a second time it changes nothing."""
        if self._new:
            self._show(len(self._new), self._waiting)
        if self._clean_up is not None:
            self._add(self._clean_up.finish())

    def _read(self) -> None:
        """Decodes the new tokens."""
        self._now = self._decode([*self._context, *self._new])
        self._waiting = self._after_context(self._now, self._new)

    def _after_context(self, text: str, ids: Sequence[int]) -> str:
        """Returns the part of a text that belongs to the tokens after the context.

        Tokenizers that spell in bytes decode a run of them as a whole, and one byte that belongs to
        no character makes U+FFFD of them all. So tokens can change what the context decodes to,
        which was shown; they are a run of their own then.
        """
        if text.startswith(self._before):
            return text[len(self._before) :]
        if not self._begun and self._before.endswith(UNFINISHED):  # they end the prompt's character
            return text[_same(text, self._before) :]
        return self._decode(ids)

    def _show(self, count: int, text: str, uncertain: int = 0) -> None:
        """Shows the text of the first new tokens. uncertain: characters at its end that were left
        out, because a later token may change them."""
        self._add(text if self._clean_up is None else self._clean_up.feed(text))
        self._begun = self._begun or bool(text)
        earlier = self._context if len(self._context) <= PATIENCE else self._context[-1:]
        self._context, self._new = self._new[:count], self._new[count:]
        self._now = self._decode(self._context)
        if not self._now:  # a blank, which is dropped at the beginning of a text
            self._context = [*earlier, *self._context]
            self._now = self._decode(self._context)
        self._before = self._now[: max(len(self._now) - uncertain, 0)]
        self._waiting = ""
        if self._new:
            self._read()

    def _add(self, text: str) -> None:
        """Adds to the text: to add to a long one would copy it each time."""
        if len(self._shown) >= MOST_PIECES:
            self._shown = ["".join(self._shown)]
        self._shown.append(text)

    def _ends_a_character(self) -> bool:
        """Shows the new tokens if the last of them spell a character and those before them belong
        to none, which the tokenizer cannot tell: it decodes all of them to U+FFFD."""
        for count in range(1, min(CHARACTER, len(self._new) - 1) + 1):
            own, others = self._new[-count:], self._new[:-count]
            alone = self._decode(own)
            if UNFINISHED in alone:
                continue
            # After itself, since a blank is dropped at the beginning of a text.
            twice = self._decode([*own, *own])
            character = twice[len(alone) :]
            if character:
                text = self._after_context(self._decode([*self._context, *others]), others)
                self._show(len(others), text)
                self._show(count, character)
                self._context, self._now, self._before = [*own, *own], twice, twice
                return True
        return False

    def _show_some(self) -> None:
        """Shows what is certain of many tokens that end in the middle of a character. Without this
        a long run of bytes that belong to no character would be decoded from its beginning at every
        token."""
        count, text = len(self._new), ""
        for end in range(count - 1, count - LONGEST - 1, -1):
            ids = self._new[:end]
            text = self._after_context(self._decode([*self._context, *ids]), ids)
            if text and not text.endswith(UNFINISHED):
                return self._show(end, text)
        # No character ends between two of the last tokens. What the tokens before them decode to
        # stays, but for the bytes at its end, which the next token may complete.
        kept = _same(text, self._waiting)
        return self._show(count - LONGEST, text[:kept], len(text) - kept)

    def _says_nothing(self, tokens: Sequence[int]) -> bool:
        """Whether tokens have no text anywhere, as special tokens that are skipped: they would only
        make every later step longer. A blank that is dropped at the beginning of a text has one
        where it comes twice."""
        return self._decode([*tokens, *tokens]) == ""

    def _decode(self, ids: Sequence[int]) -> str:
        if not ids:
            return ""
        return decoded(self._tokenizer, ids, self._skip, **self._options)


def _same(one: str, two: str) -> int:
    """With how many equal characters two texts begin."""
    pairs = enumerate(zip(one, two, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(two)))
