"""The prefix cache: keys, values and states of ended texts, for texts that begin alike, such as the
next turn of a chat."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any

from torch import Tensor

WORTHWHILE = 16
"""Tokens in common from which copying is worth its while."""


@dataclass(frozen=True, eq=False)
class SavedPrefix:
    """What a text has cached, which texts that begin alike take over."""

    slots: Sequence[Tensor] = ()
    """Its part of each buffer, ``[H, T, D]``."""
    states: Mapping[int, Mapping[Any, Tensor]] | None = None
    """The model's states after some slots, by slot, where it keeps any. Only after these can
    another text go on."""
    ahead: int = 0
    """How many tokens after its own a slot follows from, too."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        states = (held.values() for held in (self.states or {}).values())
        return sum(part.nbytes for part in (*self.slots, *chain.from_iterable(states)))

    def restorable_length(self, common: int) -> int:
        """Returns how many of its first ``common`` tokens a text that begins alike can take."""
        whole = max(0, common - self.ahead)
        if self.states is None:
            return whole
        return max((slot + 1 for slot in self.states if slot < whole), default=0)


class PrefixStore:
    """The keys and values of texts that have ended, at most ``limit`` of them, and of at most
    ``tokens`` tokens together.

    The one that was not used for longest goes first. A text that goes on where another one ended
    takes its place.
    """

    def __init__(self, limit: int, tokens: int | None = None) -> None:
        self.limit = limit
        self.tokens = tokens
        self._texts: OrderedDict[tuple[int, ...], SavedPrefix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(saved.nbytes for saved in self._texts.values())

    def takes(self, count: int) -> bool:
        """Returns whether a text of ``count`` tokens is kept: not where it alone has more than all
        may have together, since all others would leave, and then this one."""
        return self.tokens is None or count <= self.tokens

    def add(self, tokens: Sequence[int], saved: SavedPrefix) -> None:
        """Keeps a text that it `takes`.

        saved: its keys and values, one for each token that another text can take, and states.
        """
        text = tuple(tokens)
        for other in [other for other in self._texts if text[: len(other)] == other]:
            del self._texts[other]
        self._texts[text] = saved
        while len(self._texts) > self.limit or self._too_many():
            self._texts.popitem(last=False)

    def _too_many(self) -> bool:
        return self.tokens is not None and sum(map(len, self._texts)) > self.tokens

    def find(self, tokens: Sequence[int]) -> tuple[int, SavedPrefix]:
        """Returns how many of these tokens, from their beginning, the most similar text can lend,
        and what it has cached; 0 where it is not worth while."""
        wanted = tuple(tokens)
        lent = (
            (saved.restorable_length(_common(text, wanted)), text, saved)
            for text, saved in self._texts.items()
        )
        most, best, saved = max(lent, key=itemgetter(0, 1), default=(0, (), SavedPrefix()))
        if most < WORTHWHILE:
            return 0, SavedPrefix()
        self._texts.move_to_end(best)
        return most, saved

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
