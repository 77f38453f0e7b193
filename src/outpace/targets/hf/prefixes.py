"""What ended texts have cached, for texts that begin alike: the next turn of a chat."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor

WORTHWHILE = 16
"""Tokens in common from which copying is worth its while."""

Saved = list[Tensor]
"""A text's part of each buffer, ``[H, T, D]``."""


class SavedTexts:
    """The keys and values of texts that have ended, at most ``limit`` of them, and of at most
    ``tokens`` tokens together.

    The one that was not used for longest goes first. A text that goes on where another one ended
    takes its place.
    """

    def __init__(self, limit: int, tokens: int | None = None) -> None:
        self.limit = limit
        self.tokens = tokens
        self._texts: OrderedDict[tuple[int, ...], Saved] = OrderedDict()

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(part.nbytes for saved in self._texts.values() for part in saved)

    def add(self, tokens: Sequence[int], saved: Saved) -> None:
        """Keeps a text. saved: its keys and values, one for each token."""
        text = tuple(tokens)
        for other in [other for other in self._texts if text[: len(other)] == other]:
            del self._texts[other]
        self._texts[text] = saved
        while len(self._texts) > self.limit or self._too_many():
            self._texts.popitem(last=False)

    def _too_many(self) -> bool:
        return self.tokens is not None and sum(map(len, self._texts)) > self.tokens

    def find(self, tokens: Sequence[int]) -> tuple[int, Saved]:
        """Returns how many tokens the most similar text has in common with these from their
        beginning, and its keys and values; (0, []) where it is not worth while."""
        wanted = tuple(tokens)
        common, best = max(((_common(text, wanted), text) for text in self._texts), default=(0, ()))
        if common < WORTHWHILE:
            return 0, []
        self._texts.move_to_end(best)
        return common, self._texts[best]

    def clear(self) -> None:
        """Forgets all texts."""
        self._texts.clear()


def _common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """Returns how many tokens two texts begin with alike, by halving: slices compare fast."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[low:middle] == right[low:middle] else (low, middle - 1)
    return low
