"""What drafting costs and brings one request, by prices that are the same on every machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outpace.engine.acceptance import Counts, expected

STARTED = 0.1
"""Price of drafting at all, in passes of the target: catching up, masks, weighing the draft."""

SCORED = 0.04
"""Price of scoring one more token: less than on a small CPU, more than on a GPU. What both were
chosen from is in docs/decisions/0004-static-prices.md."""

SHARE = 0.01
"""Of all that was spent, what drafting may have lost."""

CREDIT = 0.6
"""Passes of the target that it may have lost beyond that."""

RESERVE = 4.0
"""Passes of the target that it may have gained to be set against what is lost later."""


@dataclass(frozen=True)
class Prices:
    """What a round costs in passes of the target, for each width of the draft.

    ladder: the widths to choose from, in nodes, and the levels of each. drafter: the price of one
    of its passes, that is the bytes it reads over those of a target's pass: a clock would say
    something else on every machine and in every run.

    >>> round(Prices({0: 0, 4: 4}, drafter=0.2).round(4, 4), 2)
    2.06
    """

    ladder: Mapping[int, int]
    drafter: float = 0.0

    def round(self, nodes: int, levels: int) -> float:
        """Returns the price of a round that drafts so many nodes in so many levels."""
        return 1 + (STARTED + self.drafter * levels + SCORED * nodes if nodes else 0.0)


class Ledger:
    """Chooses how much to draft for one request by nothing but its own history.

    The width that brings the most tokens for its price is drafted, with the acceptance by depth
    that the request has seen (Leviathan et al. 2022, section 3.3, without the assumption that all
    depths are alike). Every draft's loss against plain decoding, price less tokens, is entered, and
    its gain, as far as ``RESERVE``. While the loss is above ``CREDIT`` and ``SHARE`` of what was
    spent nothing is drafted, and where nothing seems best the narrowest draft is tried as often as
    that allows. So drafting loses no more than that and one draft, whatever the drafter is.
    """

    def __init__(self, prices: Prices, counts: Counts) -> None:
        """counts: what the request has seen, kept by somebody else."""
        self._prices, self._counts = prices, counts
        self._spent = self._loss = 0.0

    def width(self, remaining: int) -> int:
        """Returns how many nodes to draft where ``remaining`` tokens may still be generated."""
        ladder, room = self._prices.ladder, remaining - 1  # one token comes anyway
        if room <= 0:
            return 0
        tokens = expected(self._counts.chances(max(ladder.values())))
        gains = {
            width: tokens[min(levels, room)] / self._prices.round(width, levels)
            for width, levels in ladder.items()
        }
        best = max(sorted(gains), key=gains.__getitem__)
        width = best or min(width for width in ladder if width)
        lost = self._loss
        if not best:
            lost += self._prices.round(width, ladder[width]) * (1 - gains[width])
        return width if lost <= CREDIT + SHARE * self._spent else 0

    def enter(self, nodes: int, levels: int, emitted: int) -> None:
        """Enters what a round drafted and how many tokens it brought."""
        price = self._prices.round(nodes, levels)
        self._spent += price
        if nodes:
            self._loss = max(-RESERVE, self._loss + price - emitted)
