"""What the controller knows of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from outpace.policy.auto.acceptance import Counts
from outpace.policy.auto.ledger import Ledger
from outpace.policy.auto.spells import Spells
from outpace.policy.tally import Tally

ALONG = 16
"""Tokens that a drafter reads in its first pass of a round."""


@dataclass
class RowHistory:
    """What is known of a request."""

    counts: Counts
    ledger: Ledger
    going: Counts  # how far its chains go on, where something ends them
    begun: bool = False  # a request's first round reads the prompt, too
    read: int = 0  # tokens that the drafter has seen
    rounds: int = 0  # of the text so far
    drafted: bool = False  # in its last round: then the drafter is up to date
    spell: int = 0  # tokens since drafting began to promise more than plain decoding
    idle: int = 0  # tokens since it last did
    lost: float = 0.0  # plain rounds that trials in this text were expected to lose
    tally: Tally = field(default_factory=Tally)
    expected: tuple[object, Mapping[int, float]] | None = None
    """What each width was last expected to bring, after all that this follows from."""

    def begin(self, known: int) -> None:
        """Learns that the text joins the batch, perhaps once more, and that the drafter knows so
        many tokens of it."""
        self.read, self.drafted = known, False

    def unread(self, length: int) -> int:
        """Tokens that the drafter has to read before it can draft, in a text of this length. A few
        are read along with the last one."""
        behind = length - self.read
        return 0 if self.drafted or (self.read and behind <= ALONG) else behind

    def watch(self, spells: Spells, promising: bool, tokens: int, ended: bool) -> None:
        """Enters a round's tokens, and the spell of drafting that ends with it. A break so short
        that the drafter need not catch up ends none."""
        if promising:
            self.spell, self.idle = self.spell + tokens, 0
        else:
            self.idle += tokens
        if self.spell and self.idle > ALONG:
            spells.add(self.spell)
            self.spell = 0
        elif self.spell and ended and promising:
            spells.add_unbroken()
        elif self.spell and ended:
            spells.add(self.spell)
