"""What the coming round promises, by how much is drafted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outpace.policy.auto.trials import Trial


@dataclass(frozen=True)
class Offer:
    """What a drafter would draft in the coming round."""

    widths: Sequence[int]
    """Nodes in each of the rows that were chosen for."""
    trial: Trial | None = None
    """The trial that this is, where plain decoding seems better."""


@dataclass(frozen=True)
class Promise:
    """The draft that promises most, whether or not that is more than plain decoding, for a drafter
    that has nothing to read before it."""

    width: int
    seconds: float
    curve: Sequence[float]
    """Seconds of rounds by their width."""
    plain: float
    """Seconds of a plain round, which are better known than those of the curve."""

    @property
    def cost(self) -> float:
        """What each drafted token adds to a round, in plain rounds."""
        return max(0.0, self.curve[self.width] - self.plain) / (self.width * self.plain)


@dataclass(frozen=True)
class Outlook:
    """What the coming round is expected to bring and to take, by how much is drafted."""

    tokens: Mapping[int, float]  # of the rows that are not settled otherwise
    curve: Sequence[float]  # seconds of rounds by their width
    seconds: Mapping[int, float]  # what a round with chains that may be ended takes on average
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
