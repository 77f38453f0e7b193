"""The prefix cache of a drafter: its caches of earlier texts, for those that begin alike."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Protocol

from outpace.targets.hf.prefixes import WORTHWHILE, PrefixStore, SavedPrefix

TEXTS = 4
"""Texts of which the beginnings are kept, where no number is given."""

TOKENS = 1024
"""Tokens of these together: some ten to a hundred megabytes."""


class Cache(Protocol):
    """Keys and values by row, of a draft model (`Runner`) or of a head (`HeadKVCache`)."""

    def restorable_length(self, row: int, length: int) -> int:
        """Returns of how many of a row's first ``length`` tokens something can be saved."""

    def save(self, row: int, length: int) -> SavedPrefix:
        """Returns copies of what is cached of the first ``length`` tokens of a row."""

    def restore(self, row: int, saved: SavedPrefix, length: int) -> None:
        """Lets a row that has cached nothing begin with the first ``length`` saved tokens."""


class PrefixCache:
    """Keys and values of the beginnings of the latest texts.

    Many texts begin with the same chat template and system prompt, and each turn of a chat with all
    turns before it. Reading that again is most of what a draft model costs in a short text.
    """

    def __init__(
        self, cache: Cache, max_length: int, texts: int | None = None, tokens: int | None = None
    ) -> None:
        """max_length: tokens of one context. texts, tokens: how many whole texts are kept, and how
        many tokens of them together. With texts=None two sets are kept: the beginnings of `TEXTS`
        texts, `TOKENS` tokens together, and `TEXTS` whole texts that others will go on from (a
        chat's), ``tokens`` or one context's together."""
        self._cache = cache
        self.limit = TEXTS if texts is None else texts
        self._texts = PrefixStore(self.limit, TOKENS if texts is None else tokens)
        self._continued = PrefixStore(TEXTS, tokens or max_length) if texts is None else self._texts

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(texts.nbytes for texts in {self._texts, self._continued})

    def known(self, tokens: Sequence[int]) -> int:
        """Returns how many of a text's tokens, from the first on, are kept."""
        return self._find(tokens)[0]

    def _find(self, tokens: Sequence[int]) -> tuple[int, SavedPrefix]:
        return max(
            (texts.find(tokens) for texts in (self._texts, self._continued)), key=itemgetter(0)
        )

    def restore(self, row: int, tokens: Sequence[int], most: int | None = None) -> int:
        """Lets a row that has cached nothing begin with what is kept of these tokens; returns how
        many these are, ``most`` at most."""
        count, saved = self._find(tokens)
        count = count if most is None else min(count, most)
        if count:
            self._cache.restore(row, saved, count)
        return count

    def keep(self, row: int, tokens: Sequence[int], continued: bool = False) -> None:
        """Keeps the beginning of a row that is about to leave, if it is long enough to be restored.
        tokens: those that it has cached. continued: whether a later text goes on from all of it."""
        texts = self._continued if continued else self._texts
        count = self._cache.restorable_length(row, min(len(tokens), texts.tokens or len(tokens)))
        if count >= WORTHWHILE and self.limit:
            texts.add(tokens[:count], self._cache.save(row, count))

    def clear(self) -> None:
        """Forgets all texts."""
        self._texts.clear()
        self._continued.clear()
