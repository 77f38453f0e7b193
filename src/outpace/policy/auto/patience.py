"""When a drafter reads a text that it has to read before it can draft."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, fsum
from operator import mul

from outpace.policy.auto.trials import REST

REPAID = 2.0
"""Reading must be repaid so many times by what drafting promises, since texts end early, and since
of several ways that which promises most promises too much."""

BOLD = 0.02
"""What takes no more than this share of the time that is left, at the speed of plain decoding, is
read at once."""


def rounds_to_wait(
    reading: float,
    ahead: Sequence[float],
    behind: Sequence[int],
    savings: Sequence[float],
    patience: float,
) -> int:
    """Returns for how many rounds some texts should still be written without a drafter that has to
    read them first: 0 where reading them now pays, and ``REST`` where that is not in sight.

    It pays if what drafting is expected to save until the texts end repays it well. Unless it costs
    little, it waits, too, until as much has been lost by waiting as reading costs, times the
    ``patience``. This is the ski-rental rule: whoever pays the price once as much has been lost
    never loses more than twice the least possible.

    reading: what it costs, in tokens that plain decoding would write meanwhile, in all rows. ahead:
    of each text, the tokens that drafting may still bring. behind: those that it was written in
    without the drafter. savings: plain rounds that drafting saves for each of these tokens.
    patience: 0 if nothing else drafts meanwhile.

    >>> [rounds_to_wait(4.5, [100], [tokens], [0.1], patience=0.5) for tokens in (0, 20, 23)]
    [8, 3, 0]
    """
    saved, forgone = (fsum(map(mul, tokens, savings)) for tokens in (ahead, behind))
    if saved <= REPAID * reading:
        return REST
    if reading <= BOLD * fsum(ahead):
        return 0
    missing = patience * reading - forgone
    return min(REST, max(0, ceil(missing / fsum(savings))))
