"""What drafting costs and brings one request, at nominal costs instead of measured times."""

from __future__ import annotations

from collections.abc import Mapping

from outpace.core.account import Reason
from outpace.policy.auto.acceptance import REQUEST_MEMORY, Counts, Slimness
from outpace.policy.auto.decision import Decision
from outpace.policy.auto.ladder import Ladder
from outpace.policy.auto.prices import Prices

SHARE = 0.01
"""The share of all that was spent that drafting may have lost."""

CREDIT = 0.6
"""So much may be lost in addition; in passes of the target."""

RESERVE = 4.0
"""At most so much gain is kept to make up for later losses; in passes of the target."""


class Ledger:
    """Chooses how much to draft for one request by nothing but its own history.

    The width that brings the most tokens for its price is drafted, with the acceptance by depth
    that the request has seen (Leviathan et al. 2022, section 3.3, without the assumption that all
    depths are alike). Every draft is entered with what it lost against plain decoding (its price
    less its tokens), or gained, up to ``RESERVE``. While the loss is above ``CREDIT`` and ``SHARE``
    of what was spent, nothing is drafted. Where plain decoding seems best, the narrowest draft is
    tried as often as the loss allows. So drafting never loses more than this limit and one draft,
    however bad the drafter is.
    """

    def __init__(self, ladder: Ladder, prices: Prices, counts: Counts) -> None:
        """counts: of the request's own drafts; somebody else keeps them up to date."""
        self._ladder, self._prices, self._counts = ladder, prices, counts
        self._spent = self._loss = 0.0
        self._slim = Slimness(REQUEST_MEMORY)

    def width(self, remaining: int) -> int:
        """Returns how many nodes to draft where ``remaining`` tokens may still be generated."""
        ladder, room = self._ladder, remaining - 1  # one token comes anyway
        if room <= 0:
            return 0
        gains = self._gains(room)
        best = max(ladder.widths, key=gains.__getitem__)
        width = best or ladder.widths[1]
        lost = self._loss
        if not best:
            lost += self._prices.round(width, ladder.levels[width]) * (1 - gains[width])
        return width if lost <= CREDIT + SHARE * self._spent else 0

    def decision(self) -> Decision:
        """Returns why drafts are made or not, in a text that goes on for long."""
        ladder = self._ladder
        gains = self._gains(ladder.shape.height)
        best = max(ladder.widths[1:], key=gains.__getitem__)
        cost = (self._prices.round(best, ladder.levels[best]) - 1) / best
        return Decision(Reason.GAIN if gains[best] > gains[0] else Reason.NO_GAIN, cost)

    def _gains(self, room: int) -> Mapping[int, float]:
        """The tokens per pass of the target that each width promises. room: levels at most."""
        ladder = self._ladder
        chances = self._counts.chances(ladder.shape.height, ladder.shape.most_siblings)
        found = ladder.tokens(chances, room, self._slim.levels_per_node)
        return {
            width: tokens / self._prices.round(width, ladder.levels[width])
            for width, tokens in found.items()
        }

    def gain(self, nodes: int, remaining: int) -> float:
        """Returns the tokens per pass of the target that a draft of n nodes promises."""
        ladder = self._ladder
        chances = self._counts.chances(ladder.shape.height, ladder.shape.most_siblings)
        room = max(0, remaining - 1)
        found = ladder.tokens(chances, room, self._slim.levels_per_node)
        width = max(width for width in ladder.widths if width <= nodes)
        return found[width] / self._prices.round(nodes, ladder.levels[width])

    def enter(self, nodes: int, levels: int, emitted: int) -> None:
        """Enters what a round drafted and how many tokens it brought."""
        price = self._prices.round(nodes, levels)
        self._spent += price
        if nodes:
            if self._ladder.shape.is_chain:  # which stands for any tree
                self._slim.add(nodes, levels)
            self._loss = max(-RESERVE, self._loss + price - emitted)
