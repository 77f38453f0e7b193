"""What a draft model saves beside look-ups."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from outpace.policy.row import DraftingRow

WEIGHT = 24.0
"""Tokens for which what is known of other texts counts in a new one."""

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

    def saved(self, tokens: int, played: bool) -> float:
        """Returns the plain rounds that the model has saved, or would have, in a round that brought
        so many tokens. played: whether the model drafted in it. If not, it is known what became of
        the round without it.

        >>> choice = Choice(without=Way(tokens=1.2, takes=1.0), model=Way(tokens=3.0, takes=1.5))
        >>> choice.saved(1, played=False), choice.saved(3, played=False)
        (0.5, -0.5)
        >>> Choice(without=Way(tokens=3.0, takes=1.0), model=choice.model).saved(1, played=False)
        0.0
        """
        if self.model.per_token >= self.without.per_token:
            return 0.0  # the model would not be chosen
        taken = tokens * self.without.per_token if played else self.without.takes
        return taken - tokens * self.model.per_token


@dataclass
class _Sums:
    """What some tokens were expected to save."""

    tokens: float = 0.0
    saved: float = 0.0  # plain rounds


class Savings:
    """Plain rounds that a draft model saves for each token of a text, beside what look-ups save.

    A draft model reads the text before its first draft, and has to repay that. Where a look-up does
    most of the work, there is little left by which it could. So it is noted at each round of a
    text, whoever drafts in it, what the model saves there (`Choice.saved`), and how many tokens the
    round brought. What a text saves is the mean over its tokens so far, and over those of other
    texts while these are few. It is a mean over tokens: a mean over rounds would weigh what is
    copied in long drafts like the few tokens between.
    """

    def __init__(self) -> None:
        self._every = _Sums()
        self._of: WeakKeyDictionary[DraftingRow, _Sums] = WeakKeyDictionary()

    def note(self, request: DraftingRow, tokens: int, saved: float) -> None:
        """Enters a round of a text, with the tokens that it brought, and the plain rounds that the
        model saved, or would have saved."""
        every, own = self._every, self._of.setdefault(request, _Sums())
        left = MEMORY**tokens
        every.tokens, every.saved = every.tokens * left, every.saved * left
        for sums in (every, own):
            sums.tokens += tokens
            sums.saved += saved

    @property
    def known(self) -> bool:
        """Whether any round was entered."""
        return self._every.tokens > 0

    def of(self, request: DraftingRow) -> float:
        """Returns what the model is expected to save for each token of a text, if anything is
        `known`; never less than 0, since it need not draft."""
        own = self._of.get(request, _Sums())
        usual = self._every.saved / self._every.tokens
        return max(0.0, (own.saved + WEIGHT * usual) / (own.tokens + WEIGHT))
