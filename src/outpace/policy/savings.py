"""What a draft model saves beside look-ups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import Any
from weakref import WeakKeyDictionary

from outpace.policy.likeness import Alike, Text

NEAREST = 8
"""Earlier texts that count: those that are most alike. There may be sixty that are a little like a
text, because they are about code, too, and only a few of its kind."""

OF_ALL = 4.0
"""Tokens for which what is known of all texts counts beside those of texts that are alike."""

OF_KIND = 24.0
"""Tokens for which what is known of these counts beside those of a text itself."""

MEMORY = 0.997
"""How much of what is known of all texts is left after each token."""


@dataclass(frozen=True)
class Way:
    """How a round might go."""

    tokens: float
    """Tokens that the round is expected to bring a row."""
    takes: float
    """Time of the round, in plain rounds."""

    @property
    def per_token(self) -> float:
        """Plain rounds for each token."""
        return self.takes / self.tokens


@dataclass(frozen=True)
class Choice:
    """Ways in which a round may go: with a draft of the model, or in the best way without it."""

    without: Way
    model: Way
    curve: Sequence[float]
    """Plain rounds that a round of the model takes, by the number of tokens that it drafted."""

    def saved(self, tokens: int, drafted: int | None) -> float:
        """Returns the plain rounds that the model has saved, or would have, in a round that brought
        n tokens. drafted: how many the model has drafted in it; None if it has not, so that
        it is known what became of the round without it.

        >>> choice = Choice(Way(tokens=1.2, takes=1.0), Way(tokens=3.0, takes=1.5), [1.0, 1.2, 1.5])
        >>> choice.saved(1, drafted=None), choice.saved(3, drafted=2), choice.saved(1, drafted=2)
        (0.5, 1.0, -0.6666666666666666)
        >>> Choice(Way(tokens=3.0, takes=1.0), choice.model, choice.curve).saved(1, drafted=None)
        0.0
        """
        if drafted is not None:
            took = self.curve[min(drafted, len(self.curve) - 1)]
            return tokens * self.without.per_token - took
        if self.model.per_token >= self.without.per_token:
            return 0.0  # the model would not be chosen
        return self.without.takes - tokens * self.model.per_token


@dataclass
class _Sums:
    """What some tokens were expected to save."""

    tokens: float = 0.0
    saved: float = 0.0  # plain rounds

    def rate(self, usual: float, weight: float) -> float:
        """Plain rounds for each token. usual: what counts besides, as for ``weight`` tokens."""
        return (self.saved + weight * usual) / (self.tokens + weight)


class Savings:
    """Plain rounds that a draft model saves for each token of a text, beside what look-ups save.

    A draft model reads the text before its first draft, and has to repay that. Where a look-up does
    most of the work, there is little left by which it could. So it is noted at each round of a
    text, whoever drafts in it, what the model saves there (`Choice.saved`), and how many tokens the
    round brought. What a text saves is the mean over its tokens so far, and while these are few
    over those of earlier texts, above all of the few that are most like it (`Likeness`). It is a
    mean over tokens: a mean over rounds would weigh what is copied in long drafts like the few
    tokens between.
    """

    def __init__(self) -> None:
        self._every = _Sums()
        self._of: WeakKeyDictionary[Text, _Sums] = WeakKeyDictionary()

    def to_save(self, texts: Iterable[Text]) -> dict[str, Any]:
        """Returns what is known of these texts, and of all together, for a later run."""
        found = (self._of.get(text) for text in texts)
        return {
            "all": [self._every.tokens, self._every.saved],
            "texts": [sums and [sums.tokens, sums.saved] for sums in found],
        }

    def restore(self, saved: Mapping[str, Any], texts: Iterable[Text]) -> None:
        """Goes on from what an earlier run saved of as many texts."""
        self._every = _Sums(*map(float, saved["all"]))
        for text, sums in zip(texts, saved["texts"], strict=True):
            if sums is not None:
                self._of[text] = _Sums(*map(float, sums))

    def note(self, text: Text, tokens: int, saved: float) -> None:
        """Enters a round of a text, with the tokens that it brought, and the plain rounds that the
        model saved, or would have saved."""
        every, own = self._every, self._of.setdefault(text, _Sums())
        left = MEMORY**tokens
        every.tokens, every.saved = every.tokens * left, every.saved * left
        for sums in (every, own):
            sums.tokens += tokens
            sums.saved += saved

    @property
    def known(self) -> bool:
        """Whether any round was entered."""
        return self._every.tokens > 0

    def of(self, text: Text, alike: Sequence[Alike]) -> float:
        """Returns what the model is expected to save for each token of a text, if anything is
        `known`; never less than 0, since it need not draft. alike: earlier texts."""
        usual = _Sums()
        latest_first = reversed(alike)  # of texts that are as much alike, the latest count
        known = (one for one in latest_first if one.text in self._of)
        for one in nlargest(NEAREST, known, key=lambda one: one.share):
            sums = self._of[one.text]
            usual.tokens += one.share * sums.tokens
            usual.saved += one.share * sums.saved
        of_kind = usual.rate(self._every.saved / self._every.tokens, OF_ALL)
        return max(0.0, self._of.get(text, _Sums()).rate(of_kind, OF_KIND))
