"""A bandit over drafters: the one with the greatest upper confidence bound drafts.

Kim, Jung and Yun 2026, "MetaSD" (arXiv 2604.05417).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Ge

from outpace.draft.base import Round, Rows, Setup
from outpace.draft.state import numbers
from outpace.methods.choosers.base import Children
from outpace.methods.choosers.feedback import Committed
from outpace.methods.choosers.learned.base import LearningOptions, LearningSelector


class Bandit:
    """Means of rewards in [0, 1], and how often each arm was pulled.

    >>> bandit = Bandit(2, exploration=0.5)
    >>> bandit.choice, bandit.add(0, 0.9), bandit.choice
    (0, None, 1)
    """

    def __init__(self, arms: int, exploration: float) -> None:
        """exploration: beta, the width of the confidence bound."""
        self.sums, self.pulls = [0.0] * arms, [0.0] * arms
        self._exploration = exploration

    @property
    def choice(self) -> int:
        """The arm with the greatest mean + beta sqrt(2 ln t / n); one never pulled comes first."""
        if 0 in self.pulls:
            return self.pulls.index(0)
        total = math.log(max(2.0, sum(self.pulls)))

        def bound(arm: int) -> float:
            width = math.sqrt(2 * total / self.pulls[arm])
            return self.sums[arm] / self.pulls[arm] + self._exploration * width

        return max(range(len(self.pulls)), key=bound)

    def add(self, arm: int, reward: float) -> None:
        """Adds what an arm brought."""
        self.sums[arm] += reward
        self.pulls[arm] += 1


def block_divergence(shares: Sequence[float], wanted: int) -> float:
    """Returns the reward of a draft, in [0, 1].

    shares: of each token that was tested, the probability that the distributions of drafter and
    target have in common. wanted: how many tokens were to be drafted.

    >>> block_divergence([1.0], 8), block_divergence([0.75] * 8, 8)
    (0.125, 0.75)
    """
    return sum(shares) / max(wanted, len(shares))


@dataclass(frozen=True, kw_only=True)
class UcbOptions(LearningOptions):
    """What a user may set."""

    method: ClassVar[str] = "ucb"
    exploration: Annotated[float, Ge(0)] = 0.1
    """Width of the confidence bounds (beta)."""


class Ucb(LearningSelector[Bandit]):
    """Drafts with one child and learns about that one only: for drafters of similar cost that
    cannot say what they would have drafted.

    The reward of a round is its `block_divergence`, which varies less than what was accepted.
    Rows of a batch have one bandit; a sampled row with a seed of its own has its own.
    """

    name: ClassVar[str] = "ucb"
    Options: ClassVar[type[Any]] = UcbOptions

    @classmethod
    def of(cls, setup: Setup, given: Children) -> Ucb:
        options, arms = setup.options, len(given.drafters)
        return cls(given, lambda: Bandit(arms, options.exploration), options.state)

    @property
    def pulls(self) -> dict[str, float]:
        """How many drafts of each drafter were scored."""
        return dict(zip(self.names, self.learned.pulls, strict=True))

    def choice(self, rows: Rows) -> list[int]:
        return [self._learned[request].choice for request in rows.requests]

    def observe(self, round: Round) -> None:
        super().observe(round)
        round_state = self.round_state(round.rows)
        if not (self.learns and round_state.chosen):
            return  # nobody was to draft anywhere
        committed = Committed.of(round)
        for row, (arm, budget) in enumerate(
            zip(round_state.chosen, round_state.budgets, strict=True)
        ):
            if not budget:
                continue  # nobody was to draft here
            own = round_state.of(arm)
            chances = committed.of_draft(own, row) if own is not None else [0.0]
            length = len(own.nodes[row]) if own is not None else 0
            tested = chances[: max(1, min(length, len(chances)))]
            reward = block_divergence(tested, budget)
            self._learned[round.requests[row]].add(arm, reward)

    def to_save(self) -> Mapping[str, Sequence[float]]:
        shared = self.learned
        return {"sums": shared.sums, "pulls": shared.pulls}

    def restore(self, saved: Mapping[str, Any]) -> None:
        shared, arms = self.learned, len(self.children)
        shared.sums, shared.pulls = (numbers(saved, name, arms) for name in ("sums", "pulls"))
