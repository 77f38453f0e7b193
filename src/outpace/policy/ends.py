"""When texts end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any
from weakref import WeakKeyDictionary

from outpace.policy.auto.spells import HORIZON
from outpace.policy.likeness import Alike, Text

KEPT_OF_ENDS = 0.7
"""What is left of the weight of earlier texts at the end of each."""

USUAL = 0.3
"""What is known of all texts weighs as so much of a text that is the same."""


@dataclass(frozen=True)
class _End:
    """How a text has ended."""

    tokens: int
    early: bool


class Ends:
    """When texts end, by earlier ones: what a drafter has to read first must be repaid before that.

    Texts of the same kind count most (`Likeness`), and of all others the last few, because texts of
    one kind come together.

    >>> import torch
    >>> ends, kind = Ends(), Text(torch.ones(1))
    >>> ends.add(kind, tokens=20, early=True)
    >>> round(ends.expected([], remaining=1000)), round(ends.expected([Alike(kind, 1.0)], 1000))
    (117, 37)
    """

    def __init__(self) -> None:
        self._texts, self._early, self._tokens = 2.0, 1.0, 2.0 * HORIZON
        self._of: WeakKeyDictionary[Text, _End] = WeakKeyDictionary()

    def to_save(self, texts: Iterable[Text]) -> dict[str, Any]:
        """Returns how these texts have ended, and all together, for a later run."""
        found = (self._of.get(text) for text in texts)
        return {
            "all": [self._texts, self._early, self._tokens],
            "texts": [end and [end.tokens, end.early] for end in found],
        }

    def restore(self, saved: Mapping[str, Any], texts: Iterable[Text]) -> None:
        """Goes on from what an earlier run saved of as many texts."""
        self._texts, self._early, self._tokens = map(float, saved["all"])
        for text, end in zip(texts, saved["texts"], strict=True):
            if end is not None:
                self._of[text] = _End(int(end[0]), bool(end[1]))

    def add(self, text: Text, tokens: int, early: bool) -> None:
        """Adds a text that has ended with n generated tokens. early: it might have gone
        on."""
        end = self._of[text] = _End(max(1, tokens), early)
        self._texts = self._texts * KEPT_OF_ENDS + 1
        self._early = self._early * KEPT_OF_ENDS + end.early
        self._tokens = self._tokens * KEPT_OF_ENDS + end.tokens

    def expected(self, alike: Sequence[Alike], remaining: int, so_far: int = 0) -> float:
        """Returns how many tokens are expected to come where n may: as if texts ended by
        themselves with the same chance at each token.

        alike: earlier texts. so_far: tokens of this text, which has not ended: that says something
        about the chance, too.
        """
        early, tokens = (USUAL * each / self._texts for each in (self._early, self._tokens))
        for one in alike:
            end = self._of.get(one.text)
            if end is not None:
                early += one.share * end.early
                tokens += one.share * end.tokens
        chance = early / (tokens + so_far)
        return (1 - exp(-chance * remaining)) / chance if chance else float(remaining)
