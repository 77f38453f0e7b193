"""Hedge over several drafters: the recent gain of each, and the allowance for asking models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIKE = 1.02
"""Another drafter must promise this many times what the present one does, because it has to read
the tokens that it has not seen."""

LEAST, MOST = 1e-3, 1e3
"""A gain is no less and no more than this, whatever was observed or read from a file."""

LONGEST_SILENCE = 4.0
"""An observation of a drafter also counts for the tokens since the last one, but at most for this
many times its own tokens: a single round must not be all that is known."""

AT_FIRST = 4.0
"""What asking models may cost at first, in passes of the target, for all texts together. A
reproducible text has what it is expected to earn instead."""


class Shadow:
    """The rounds that one drafter alone would have needed for a text, by its chances.

    A drafter's rounds begin where its own drafts end, and not where another one's do. So this
    follows where its present draft may have begun: ``begun[k]`` is the chance that k of its tokens
    have been accepted so far. Where rounds bring one token here and five there, their mean over all
    tokens of the text would promise more than such rounds bring.

    >>> shadow = Shadow(horizon=2)
    >>> [shadow.ended(chance) for chance in (1.0, 1.0, 1.0, 0.0, 0.5)]
    [0.0, 0.0, 1.0, 1.0, 0.5]
    """

    def __init__(self, horizon: int) -> None:
        """horizon: tokens of a draft."""
        self.begun = [1.0, *[0.0] * horizon]

    def ended(self, chance: float) -> float:
        """Returns how many rounds, on average, end with the next token of the text. chance: that a
        draft which gets this far has that token. After a whole draft it is the extra token."""
        *drafting, whole = self.begun
        ended = whole + (1 - chance) * sum(drafting)
        self.begun = [ended, *(chance * share for share in drafting)]
        return ended


class HedgeState:
    """What N drafters would have brought lately, of which the greatest leads.

    A drafter's gain is the tokens per cost of the rounds that it would have run alone; older tokens
    count less and less. Gains are known for all drafters, whichever drafted. The leader is the
    drafter with most weight, by Hedge's weights exp(eta x gain); it is taken without a draw, so
    that texts are reproducible.
    """

    def __init__(self, costs: Sequence[float], memory: float) -> None:
        """costs: of a round with each drafter; memory: what is kept at each token."""
        self.costs, self.memory = list(costs), memory
        # Rounds per token. At first all gains are equal, and the drafter named first leads.
        self.rounds = [1 / cost for cost in self.costs]
        self.best = 0
        self._unobserved = [0.0] * len(self.costs)
        """Tokens since each drafter was asked last."""

    @property
    def gains(self) -> list[float]:
        """Tokens for the cost of a round, by drafter; 1 before anything is learned."""
        pairs = zip(self.rounds, self.costs, strict=True)
        return [1 / (rounds * cost) for rounds, cost in pairs]

    @gains.setter
    def gains(self, gains: Sequence[float]) -> None:
        pairs = zip(gains, self.costs, strict=True)
        self.rounds = [1 / (min(max(LEAST, gain), MOST) * cost) for gain, cost in pairs]

    def learn(self, ended: Sequence[Sequence[float] | None], count: int) -> None:
        """Adds the tokens of one round, ``count`` of them. ended: by drafter, how many of its own
        rounds ended with each token; None for a drafter that was not asked."""
        for number, new in enumerate(ended):
            self._unobserved[number] += count
            if new is not None:
                kept = self.memory ** min(self._unobserved[number] / count, LONGEST_SILENCE)
                for each in new:
                    self.rounds[number] = kept * self.rounds[number] + (1 - kept) * each
                self.rounds[number] = max(self.rounds[number], 1 / (MOST * self.costs[number]))
                self._unobserved[number] = 0.0
        gains = self.gains
        top = max(range(len(gains)), key=gains.__getitem__)
        if gains[top] > ALIKE * gains[self.best]:
            self.best = top


@dataclass
class Allowance:
    """What asking models may cost: a share of the cost of all rounds, and a credit at first."""

    share: float
    at_first: float = 0.0
    """What may be spent before anything is earned."""
    earned: float = 0.0
    """The cost of all rounds so far."""
    spent: float = 0.0
    held: float = 0.0
    """What will be spent in the present round, unless that is run again."""

    def hold(self, cost: float) -> bool:
        """Returns whether this may be spent, and reserves it if so."""
        allowed = self.spent + self.held + cost <= self.at_first + self.share * self.earned
        self.held += cost if allowed else 0.0
        return allowed

    def pay(self, cost: float) -> None:
        """Spends what was reserved."""
        self.held, self.spent = self.held - cost, self.spent + cost
