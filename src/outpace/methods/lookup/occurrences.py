"""An index of the places of every token, for exact look-ups of contexts of any length."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SEPARATOR = -1
"""Stands between texts and after the last one; no token is equal to it."""

LOOKED_AT = 2048
"""Latest places of a token that a look-up compares. It bounds what a look-up can cost, and only
the most frequent tokens of long texts stand in more places."""

MARGIN = 256
"""Entries after the last token that can be read: the longest continuation."""


class Occurrences:
    """Texts that grow at their end and may be forgotten from their beginning.

    It answers what a suffix tree would: where the last tokens of a context stood before, and how
    many of them agree at each place. Instead of a tree it keeps the places of every token; a
    look-up filters those of the context's last token. Adding a token takes constant time and
    some 20 bytes; forgetting one moves the later places of the same token, eight bytes each.
    """

    def __init__(self, reach: int) -> None:
        """reach: tokens of a context that are compared at most."""
        self.reach = reach
        self._first = reach  # the number of the first token that is kept; numbers are never reused
        self._end = reach
        self._shift = 0  # the number of the buffer's first entry
        self._buffer = np.full(4 * reach + 2 * MARGIN, SEPARATOR, np.int32)
        self._places: dict[int, array[int]] = {}

    def __len__(self) -> int:
        return self._end - self._first

    @property
    def end(self) -> int:
        """The number that the next token will have."""
        return self._end

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens; `SEPARATOR` among them separates texts."""
        self._make_room(len(tokens))
        begin = self._end - self._shift
        self._buffer[begin : begin + len(tokens)] = tokens
        places = self._places
        for place, token in enumerate(tokens, self._end):
            if token in places:
                places[token].append(place)
            elif token != SEPARATOR:
                places[token] = array("q", (place,))
        self._end += len(tokens)

    def forget(self, count: int) -> None:
        """Drops the oldest tokens."""
        begin = self._first - self._shift
        for token in self._buffer[begin : begin + count].tolist():
            if token == SEPARATOR:
                continue
            places = self._places[token]
            del places[0]
            if not places:
                del self._places[token]
        self._buffer[begin : begin + count] = SEPARATOR
        self._first += count

    def tokens(self, start: int, stop: int) -> list[int]:
        """Returns the tokens of these numbers."""
        found: list[int] = self._buffer[start - self._shift : stop - self._shift].tolist()
        return found

    def matches(self, context: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the places ``[C]``, latest first, that follow the context's last token, and how
        many of the context's last tokens (1 to ``reach``) agree before each.

        A place is the number of a token; only those are found at which a token stands.
        """
        places = self._places.get(context[-1]) if context else None
        if places is None:
            return _NONE, _NONE
        follow = np.array(places[-LOOKED_AT:])[::-1] + 1
        if follow[0] == self._end:
            follow = follow[1:]
        agree = np.ones(len(follow), np.int64)
        compared = min(self.reach, len(context))
        if compared == 1 or not len(follow):
            return follow, agree
        more = (self._buffer[follow - (2 + self._shift)] == context[-2]).nonzero()[0]
        if len(more):
            before = np.array(context[-compared:], np.int32)[::-1]
            index = follow[more, None] - (np.arange(1, compared + 1) + self._shift)
            same = self._buffer[index] == before
            agree[more] = np.where(same.all(1), compared, same.argmin(1))
        return follow, agree

    def continuations(self, places: NDArray[np.int64], length: int) -> list[list[int]]:
        """Returns the tokens from each place on, `SEPARATOR` where a text has ended before."""
        index = places[:, None] + (np.arange(min(length, MARGIN)) - self._shift)
        found: list[list[int]] = self._buffer[index].tolist()
        return found

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        # A copy of the list, because another thread may be writing.
        places = sum(sys.getsizeof(each) + sys.getsizeof(0) for each in list(self._places.values()))
        return self._buffer.nbytes + sys.getsizeof(self._places) + places

    def _make_room(self, count: int) -> None:
        """Moves what is kept to the front of the buffer, or of a larger one, if it would run over.

        ``reach`` entries stay before the first token, so that every comparison stays inside.
        """
        need = self._end - self._shift + count + MARGIN
        if need <= len(self._buffer):
            return
        kept = self._buffer[self._first - self._shift : self._end - self._shift]
        size = max(len(self._buffer), 2 * (self.reach + len(kept) + count + MARGIN))
        buffer = np.full(size, SEPARATOR, np.int32)
        buffer[self.reach : self.reach + len(kept)] = kept
        self._buffer, self._shift = buffer, self._first - self.reach


_NONE: NDArray[np.int64] = np.empty(0, np.int64)
