"""Sequential tests by betting: they may be stopped at any time and never raise too many alarms.

A bet on the next token is a function e >= 0 of the token, chosen before the token is seen, with
mean 1 under the distribution that is claimed. The product of these numbers over the tokens is the
wealth of a gambler who started with 1, in a game that is fair if the claim is true, so that (Ville
1939)

    P(the wealth ever reaches 1 / alpha) <= alpha

however many tokens there are and whenever one looks or stops. Nothing is approximate: there are no
asymptotics and no correction for looking often. A wealth of 40 says that under the claim at most
one run in 40 comes that far. See Shafer 2021, "Testing by betting"; Ramdas et al. 2023,
"Game-theoretic statistics and safe anytime-valid inference" (arXiv 2210.01948). The wealth
may be shared among bets on different kinds of deviation: the sum is fair too, and if one of them is
right the sum grows as that bet does, times its share.

**Rounding.** Logits computed in another order differ by up to some tau, so that the distribution in
force is within a factor exp(+-2 tau) of the claimed one. A bet then has mean at most 1 + slack *
E|e - 1|, with slack = exp(2 tau) - 1 and the expectation taken under the claim; each bet is divided
by that, and the guarantee holds for every distribution within the factor.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Amounts to bet: the coefficients of the bets of each kind.
LINEAR = np.array([-0.9, -0.45, -0.15, -0.05, 0.05, 0.15, 0.45, 0.9])
CURVED = np.array([-0.8, -0.4, -0.1, 0.1, 0.4, 0.8])
ODDS = np.array([-1.0, -0.25, 0.25, 1.0])
RARE = np.array([1.0, 4.0])
STRENGTHS = np.array([8.0, 64.0])
ECHOES = np.array([-0.9, -0.3, 0.3, 0.9])


class Family(Protocol):
    """Bets of one kind, with different amounts: each has a wealth of its own."""

    log_wealth: Array  # [bets]; another array, never the same one changed, once bets are settled


AnyFamily = TypeVar("AnyFamily", bound=Family)


def tilt_gains(low: Array, high: Array, slack: float) -> Array:
    """Returns ``[..., bets]``: log e of the bets on a token that takes the part [low, high] of
    [0, 1].

    Where tokens are laid side by side, each as long as it is probable, a draw from the distribution
    falls uniformly on [0, 1]. The bets are 1 + c f, with f the first or second Legendre polynomial
    averaged over the token's share (so no extra randomness is needed for a discrete distribution),
    whose mean is 0.
    """
    linear = 1 - (low + high)
    curved = 2 * (high * high + high * low + low * low) - 3 * (low + high) + 1
    moved = np.concatenate([linear[..., None] * LINEAR, curved[..., None] * CURVED], -1)
    # E|f| is at most 0.5 for the first polynomial and 0.39 for the second.
    cost: Array = np.log1p(0.5 * slack * np.abs(np.concatenate([LINEAR, CURVED])))
    gains: Array = np.log1p(moved) - cost
    return gains


class Tilts:
    """Bets that tokens at one end, or at both ends, of some order come too often or too rarely."""

    def __init__(self, slack: float = 0.0) -> None:
        self.log_wealth = np.zeros(len(LINEAR) + len(CURVED))
        self._slack = slack

    def observe(self, low: float, high: float) -> None:
        """Settles the bets with a token that takes the part [low, high] of [0, 1]."""
        gains = tilt_gains(np.asarray(low), np.asarray(high), self._slack)
        self.log_wealth = self.log_wealth + gains


class Chances:
    """Bets that an event is more or less probable than claimed, by a factor in its odds."""

    def __init__(self, slack: float = 0.0, odds: Array = ODDS) -> None:
        self.log_wealth = np.zeros(len(odds))
        self._odds = np.exp(odds)
        self._slack = slack

    def observe(self, mass: float, happened: bool) -> None:
        """Settles the bets with an event that has the probability ``mass`` under the claim."""
        if not 0 < mass < 1:
            return
        mean = 1 - mass + mass * self._odds
        yes, no = self._odds / mean, 1 / mean
        away = mass * np.abs(yes - 1) + (1 - mass) * np.abs(no - 1)
        self.log_wealth = self.log_wealth + np.log(
            (yes if happened else no) / (1 + self._slack * away)
        )


class Echoes:
    """Bets that the token's place in [0, 1] repeats, or avoids, an earlier and independent one."""

    def __init__(self, slack: float = 0.0) -> None:
        self.log_wealth = np.zeros(len(ECHOES))
        self._slack = slack

    def observe(self, earlier: float, low: float, high: float) -> None:
        """Settles the bets with a token at [low, high]; ``earlier`` was known before it."""
        sides = ECHOES * (1 - 2 * earlier)
        cost = np.log1p(0.5 * self._slack * np.abs(sides))
        self.log_wealth = self.log_wealth + np.log1p(sides * (1 - low - high)) - cost


class Tables:
    """Bets that the next token after a text is the one that came after the same text before.

    Each text has a table of bins, with the count of tokens in each, n in all. The bet on a bin is
    (count + c mass) / (n + c), divided by the bin's probability ``mass`` under the claim. The
    greater c is, the more tokens must be seen before the bet leaves the claim.
    """

    def __init__(self, slack: float = 0.0) -> None:
        self.log_wealth = np.zeros(len(STRENGTHS))
        self._slack = slack
        self._counts: dict[Hashable, Array] = {}

    def observe(self, text: Hashable, masses: Array, chosen: int) -> None:
        """Settles the bets with a token in the bin ``chosen``; ``masses`` are the probabilities
        of the bins under the claim."""
        if masses[chosen] <= 0:
            return
        counts = self._counts.setdefault(text, np.zeros(len(masses)))
        strength = STRENGTHS[:, None]
        distribution = (counts + strength * masses) / (counts.sum() + strength)
        away = np.abs(distribution - masses).sum(1)
        gain = np.log(distribution[:, chosen] / masses[chosen]) - np.log1p(self._slack * away)
        self.log_wealth = self.log_wealth + gain
        counts[chosen] += 1


class SequentialTest:
    """Wealth shared among named families of bets; there is an ``alarm`` once it has reached
    1 / alpha.

    >>> test = SequentialTest(alpha=0.001)
    >>> tilts = test.stake("rank", 1.0, Tilts())
    >>> for _ in range(30):
    ...     tilts.observe(0.0, 0.25)
    ...     test.settle()
    >>> test.alarm
    True
    """

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self.observations = 0
        self.log_wealth = 0.0
        self.log_peak = 0.0
        self.alarmed_at: int | None = None
        self._stakes: dict[str, tuple[float, Family]] = {}
        self._known: dict[str, tuple[Array, float]] = {}
        """By family, its wealth when it was looked at last, and the value of that. A token settles
        the bets of a few families only, and there is one for each position of a text."""

    def stake(self, name: str, share: float, family: AnyFamily) -> AnyFamily:
        """Puts a share of the starting wealth on a family; returns the family."""
        self._stakes[name] = (share, family)
        return family

    def settle(self, impossible: bool = False) -> None:
        """Counts one observation, after all families have been given it.

        impossible: the claim gives what was seen the probability 0, whatever the rounding.
        """
        self.observations += 1
        if impossible:
            self.log_wealth = math.inf
        elif self.log_wealth < math.inf:
            self.log_wealth = log_total(np.array([self._log_value(name) for name in self._stakes]))
        self.log_peak = max(self.log_peak, self.log_wealth)
        if self.alarm and self.alarmed_at is None:
            self.alarmed_at = self.observations

    @property
    def alarm(self) -> bool:
        """Whether the claim is refuted at level alpha."""
        return self.log_peak >= -math.log(self.alpha)

    @property
    def p_value(self) -> float:
        """The least alpha at which there would have been an alarm: valid at any stopping time."""
        return math.exp(-self.log_peak)

    @property
    def leading(self) -> str:
        """Name of the family with the greatest wealth."""
        return max(self._stakes, key=self._log_value)

    def _log_value(self, name: str) -> float:
        share, family = self._stakes[name]
        wealth = family.log_wealth
        known = self._known.get(name)
        if known is None or known[0] is not wealth:
            value = math.log(share) + log_total(wealth) - math.log(len(wealth))
            known = self._known[name] = (wealth, value)
        return known[1]


def log_total(logs: Array) -> float:
    """Returns the logarithm of the sum of exponentials.

    >>> round(log_total(np.log(np.array([1.0, 3.0]))), 6) == round(math.log(4), 6)
    True
    """
    top = float(logs.max())
    return top + math.log(float(np.exp(logs - top).sum()))
