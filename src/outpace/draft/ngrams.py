"""The n-grams of one request by their first token."""

from __future__ import annotations

import sys
from collections.abc import Sequence


class NgramPool:
    """The latest different n-grams that begin with each token.

    Those of the request's text enter by `learn`, others by `add`.
    """

    def __init__(self, size: int, most: int) -> None:
        """size: tokens of an n-gram; most: n-grams that are kept for each first token."""
        self._size, self._most = size, most
        self._found: dict[int, list[tuple[int, ...]]] = {}
        self._tail: list[int] = []
        self.known = 0

    def learn(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the request's text."""
        text, size = [*self._tail, *tokens], self._size
        self.known += len(tokens)
        for begin in range(len(text) - size + 1):
            self.add(text[begin : begin + size])
        self._tail = text[max(0, len(text) - size + 1) :]

    def add(self, ngram: Sequence[int]) -> None:
        """Enters an n-gram as the latest one."""
        found = self._found.setdefault(ngram[0], [])
        rest = tuple(ngram[1:])
        if rest in found:
            found.remove(rest)
        found.insert(0, rest)
        del found[self._most :]

    def after(self, token: int) -> Sequence[tuple[int, ...]]:
        """Returns what follows a token in its n-grams, the latest first."""
        return self._found.get(token, ())

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        lists = list(self._found.values())  # a copy, because another thread may be writing
        number = sys.getsizeof(0)
        one = sys.getsizeof((0,) * (self._size - 1)) + number * (self._size - 1)
        inside = sum(sys.getsizeof(found) + one * len(found) for found in lists)
        return sys.getsizeof(self._found) + number * len(lists) + inside
