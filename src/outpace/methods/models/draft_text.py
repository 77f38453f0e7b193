"""A text in the tokens of the model that drafts for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence


class DraftText(ABC):
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


class SharedTokensText(DraftText):
    """The tokens of the target that the drafter has too.

    Those that stand for images are left out: a model of text alone was never shown them. Gagrani et
    al. 2024, "On Speculative Decoding for Multimodal Large Language Models" (arXiv 2404.08856).

    >>> text = SharedTokensText(size=8, hidden=frozenset({7}))
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
        return False

    def extend(self, tokens: Sequence[int]) -> list[int]:
        self._tokens += [
            token for token in tokens if token < self._size and token not in self._hidden
        ]
        self._read += len(tokens)
        return self._tokens


class ImagePromptText(DraftText):
    """A text whose prompt the drafter reads in tokens of its own, which show it images.

    >>> text = ImagePromptText([1, 9, 9, 9, 2], stands_for=4, rest=SharedTokensText(size=8))
    >>> text.extend([1, 7, 7, 2, 3])
    [1, 9, 9, 9, 2, 3]
    >>> text.hide({9})
    >>> text.extend([4])
    [1, 2, 3, 4]
    """

    def __init__(self, prompt: Sequence[int], stands_for: int, rest: DraftText) -> None:
        """prompt: own tokens, for this many of the target's. rest: what follows them."""
        self._prompt, self._stands_for, self._rest = list(prompt), stands_for, rest
        self._skipped = 0

    @property
    def read(self) -> int:
        return self._skipped + self._rest.read

    @property
    def unfinished(self) -> bool:
        return self._rest.unfinished

    def extend(self, tokens: Sequence[int]) -> list[int]:
        skipped = min(len(tokens), self._stands_for - self._skipped)
        self._skipped += skipped
        return [*self._prompt, *self._rest.extend(tokens[skipped:])]

    def hide(self, placeholders: Collection[int]) -> None:
        """Leaves the tokens that stand for images out of the prompt from now on."""
        self._prompt = [token for token in self._prompt if token not in placeholders]
