"""Adaptive draft-exiting: a chain ends after a token that the drafter gave a low probability, and
the threshold for that follows what is accepted.

Draft & Verify (Zhang et al. 2024, arXiv 2309.08168), section 3.4. The unlikely token stays in the
draft. What decides is known before the next token is drawn, so each token still follows its
distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from outpace.core.proposal import StoppingFn

FIRST = 0.6
"""The threshold before anything is known."""


@dataclass(frozen=True)
class ThresholdRule:
    """How a threshold follows the acceptance rate. The defaults are the paper's.

    >>> threshold, rate = ThresholdRule().moved(0.6, 0.9, drafted=4, accepted=0)
    >>> round(threshold, 3), rate
    (0.601, 0.45)
    """

    wanted: float = 0.9
    """The acceptance rate that the threshold is moved towards."""
    step: float = 0.01
    """How far it is moved at a time, before that is smoothed (the paper's epsilon)."""
    rate_memory: float = 0.5
    """Weight of the rounds before in the acceptance rate (the paper's beta 1)."""
    threshold_memory: float = 0.9
    """Weight of the old threshold in the new one (the paper's beta 2)."""

    def moved(
        self,
        threshold: float,
        rate: float | None,
        drafted: int,
        accepted: int,
        lowers: bool = True,
    ) -> tuple[float, float]:
        """Returns the threshold, a probability, and the acceptance rate after one more draft.

        rate: of the drafts before; None: there were none. drafted: at least 1. lowers: whether a
        rate above the wanted one lowers the threshold.
        """
        now = accepted / drafted
        if rate is not None:
            now = self.rate_memory * rate + (1 - self.rate_memory) * now
        if now <= self.wanted:
            step = self.step
        elif lowers:
            step = -self.step
        else:
            return threshold, now
        kept = self.threshold_memory
        moved = kept * threshold + (1 - kept) * (threshold + step)
        return min(1.0, max(0.0, moved)), now


PAPER = ThresholdRule()


@dataclass(frozen=True)
class ExitThreshold:
    """The threshold of a text, and the acceptance rate that it follows.

    >>> ExitThreshold().after(PAPER, drafted=4, accepted=2).rate
    0.5
    """

    threshold: float = FIRST
    rate: float | None = None
    """Accepted tokens by drafted ones, smoothed; None before the first draft."""

    def after(
        self, rule: ThresholdRule, drafted: int, accepted: int, full_length: bool = False
    ) -> ExitThreshold:
        """Returns what it is after one more draft, of at least one token.

        full_length: the draft was as long as it could be. That says nothing against the
        threshold, which is then not lowered.
        """
        moved = rule.moved(self.threshold, self.rate, drafted, accepted, lowers=not full_length)
        return ExitThreshold(*moved)


def probability(distribution: Tensor, token: Tensor) -> Tensor:
    """Returns ``[B]``: each token's probability. distribution: ``[B, V]``; token: ``[B]``."""
    return distribution.gather(-1, token[:, None])[:, 0]


def below(thresholds: Sequence[float]) -> StoppingFn:
    """Returns what ends a chain after a token less probable than its row's threshold."""
    return lambda distribution, token: (
        probability(distribution, token) < distribution.new_tensor(thresholds)
    )
