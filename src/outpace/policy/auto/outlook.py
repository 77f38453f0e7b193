"""What the coming round promises, by how much is drafted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Promise:
    """The draft that promises most, whether or not that is more than plain decoding, for a drafter
    that has nothing to read before it."""

    width: int
    seconds: float
    plain: float
    """Seconds of a plain round."""


@dataclass(frozen=True)
class Outlook:
    """What the coming round is expected to bring and to take, by how much is drafted."""

    tokens: Mapping[int, float]  # of the rows that are not settled otherwise
    seconds: Mapping[int, float]
    rates: Mapping[int, float]  # tokens of all rows per second

    @property
    def widest(self) -> int:
        """The largest width of which anything is known."""
        return max(self.rates)

    @property
    def best(self) -> int:
        """The width that promises most."""
        return max(self.rates, key=self.rates.__getitem__)

    @property
    def drafted(self) -> int:
        """The width above 0 that promises most."""
        return max((width for width in self.rates if width), key=self.rates.__getitem__)

    @property
    def gain(self) -> float:
        """How many times as fast as plain decoding the best one is."""
        return self.rates[self.best] / self.rates[0]
