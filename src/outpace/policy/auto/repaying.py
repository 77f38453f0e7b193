"""Whether a drafter should read a text that it has to read before it can draft."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import fsum

REPAID = 2.3
"""Reading must be repaid this many times by what drafting promises, since texts end early, and
since of several ways that which promises most promises too much."""


@dataclass(frozen=True)
class Prospect:
    """What drafting is expected to bring in the rest of a text."""

    ahead: float
    """Tokens for which it goes on."""
    saves: float
    """Plain rounds that it saves for each of them."""


def repays(reading: float, prospects: Iterable[Prospect]) -> bool:
    """Returns whether drafting in some texts is expected to repay reading them well.

    reading: what it costs, in tokens that plain decoding would write meanwhile, in all rows.

    >>> repays(4.5, [Prospect(ahead=100, saves=0.2)]), repays(4.5, [Prospect(100, saves=0.1)])
    (True, False)
    """
    return fsum(each.ahead * each.saves for each in prospects) > REPAID * reading
