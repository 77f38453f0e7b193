"""A bounded store of the texts of finished requests."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from outpace.methods.lookup.occurrences import SEPARATOR, Occurrences


class PastTexts:
    """A bounded store of texts that forgets those first that were of no use for longest.

    The oldest text is dropped when the store is full, unless something was found in it since: then
    it counts as new once more (the "second chance" form of least recently used).
    """

    def __init__(self, reach: int, max_texts: int, max_tokens: int) -> None:
        """reach: tokens of a context that are compared at most."""
        self._reach, self._max_texts, self._max_tokens = reach, max_texts, max_tokens
        self.clear()

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def tokens(self) -> int:
        """How many tokens are kept, with one separator for each text."""
        return len(self.occurrences)

    def add(self, text: Sequence[int]) -> None:
        """Keeps a text, the end of it where it is too long."""
        text = text[max(0, len(text) + 1 - self._max_tokens) :]
        if not text or not self._max_texts:
            return
        self._changing = True
        while self._is_full(len(text) + 1):
            self._drop_oldest()
        self._append([*text, SEPARATOR])
        self._changing = False

    def texts(self) -> Iterator[list[int]]:
        """Yields the texts, those first that will be forgotten first."""
        ends = [*self._starts[1:], self.occurrences.end]
        for begin, after in zip(self._starts, ends, strict=False):
            yield self.occurrences.tokens(begin, after - 1)  # without what separates them

    def clear(self) -> None:
        """Empties the store."""
        self.occurrences = Occurrences(self._reach)
        self._starts: list[int] = []
        self._used: list[bool] = []
        self._changing = False

    def recover(self) -> None:
        """Empties the store if an interruption has left it in the middle of a change."""
        if self._changing:
            self.clear()

    def touch(self, place: int) -> None:
        """Learns that what stands at this place was of use."""
        self._used[bisect_right(self._starts, place) - 1] = True

    def _is_full(self, more: int) -> bool:
        full = len(self) >= self._max_texts or self.tokens + more > self._max_tokens
        return full and len(self) > 0

    def _drop_oldest(self) -> None:
        begin = self._starts.pop(0)
        used = self._used.pop(0)
        end = self._starts[0] if self._starts else self.occurrences.end
        text = self.occurrences.tokens(begin, end)
        self.occurrences.forget(end - begin)
        if used:
            self._append(text)

    def _append(self, text: Sequence[int]) -> None:
        self._starts.append(self.occurrences.end)
        self._used.append(False)
        self.occurrences.extend(text)
