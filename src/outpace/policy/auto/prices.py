"""What a round costs in passes of the target, at nominal costs that do not depend on any clock."""

from __future__ import annotations

from dataclasses import dataclass

HOST = 30e9
"""Bytes of weights that a pass reads in the time that its other work takes. That work weighs on
small models, and hardly on others. What all these were chosen from is in
docs/decisions/0004-static-prices.md."""

PASS = 0.3e-3 * HOST
"""The fixed cost of a pass of the target besides reading its weights, expressed in bytes."""

STARTED = 1.1e-3 * HOST
"""The fixed cost of drafting in a round (catching up, masks, the verdict), expressed in bytes."""

DRAWN = 0.3e-3 * HOST
"""The fixed cost of a pass of the drafter besides reading its weights, expressed in bytes."""

FORKED = 1.5e-3 * HOST
"""What a tree costs more than a chain, expressed in bytes."""

SCORED = {"cpu": 0.1}
"""Passes that scoring one more token costs, by kind of device."""

SCORED_ELSEWHERE = 0.02


@dataclass(frozen=True)
class Prices:
    """Prices of the parts of a round, in passes of the target.

    >>> round(Prices(level=0.2, node=0.05).round(nodes=4, levels=4), 2)
    2.0
    """

    level: float = 0.0
    node: float = SCORED["cpu"]
    started: float = 0.0
    forked: float = 0.0

    @classmethod
    def nominal(cls, drafter: int, target: int, device: str, aux_tokens: int = 0) -> Prices:
        """Returns the prices for bytes of weights that a pass of each reads; drafter: 0 for one
        that is no model. device: its kind. aux_tokens: columns after the root and each node.

        A measured time would be another one on every machine and in every run.
        """
        whole, scored = target + PASS, SCORED.get(device, SCORED_ELSEWHERE)
        return cls(
            level=(drafter + DRAWN) / whole if drafter else 0.0,
            node=scored * (1 + aux_tokens),
            started=STARTED / whole + scored * aux_tokens,
            forked=FORKED / whole,
        )

    def round(self, nodes: int, levels: int) -> float:
        """Returns the price of a round that drafts ``nodes`` in ``levels``."""
        if not nodes:
            return 1.0
        drafted = self.started + self.level * levels + self.forked * (nodes > levels)
        return 1 + drafted + self.node * nodes
