"""A text in the tokens of the model that drafts for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class OwnText(ABC):
    """One text as a drafter reads it, which grows with the target's."""

    @property
    @abstractmethod
    def read(self) -> int:
        """How many of the target's tokens it has been given."""

    @property
    @abstractmethod
    def unfinished(self) -> bool:
        """Whether nothing can be drafted where the text ends."""

    @abstractmethod
    def extend(self, tokens: Sequence[int]) -> list[int]:
        """Adds tokens of the target, and returns the whole text in the drafter's own."""


class KnownTokens(OwnText):
    """The tokens of the target that the drafter has too.

    Those that stand for images are left out: a model of text alone was never shown them. Gagrani et
    al. 2024, "On Speculative Decoding for Multimodal Large Language Models" (arXiv 2404.08856).

    >>> text = KnownTokens(size=8, hidden=frozenset({7}))
    >>> text.extend([1, 7, 7, 9, 2])
    [1, 2]
    >>> text.read
    5
    """

    def __init__(self, size: int, hidden: frozenset[int] = frozenset()) -> None:
        """size: tokens of the drafter, which are the target's first ones. hidden: those that stand
        for images."""
        self._size, self._hidden = size, hidden
        self._tokens: list[int] = []
        self._read = 0

    @property
    def read(self) -> int:
        return self._read

    @property
    def unfinished(self) -> bool:
        return not self._tokens

    @property
    def length(self) -> int:
        """How many tokens it has."""
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> list[int]:
        self._tokens += [
            token for token in tokens if token < self._size and token not in self._hidden
        ]
        self._read += len(tokens)
        return self._tokens
