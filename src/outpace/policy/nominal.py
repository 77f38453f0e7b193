"""Nominal costs of a round, from the bytes that it reads, for choices that no clock may decide."""

from __future__ import annotations

from dataclasses import dataclass

PASS_OVERHEAD, DRAFT_OVERHEAD, TREE_OVERHEAD = 9e6, 33e6, 45e6
"""What weighs on small models, and hardly on others, as bytes of weights that could be read in that
time: a pass of the target or of the drafter besides reading weights; drafting at all (catching up,
masks, the verdict); comparing siblings (measured: docs/decisions/0004-static-prices.md)."""

TOKEN_COST, CPU_TOKEN_COST = 0.02, 0.1
"""Passes that scoring one more token costs."""


@dataclass(frozen=True)
class NominalCosts:
    """What the parts of a round cost in passes of the target, without any clock: a measured time
    would be another one on every machine and in every run.

    >>> round(NominalCosts(level=0.2, node=0.05).round(nodes=4, levels=4), 2)
    2.0
    """

    level: float = 0.0
    node: float = CPU_TOKEN_COST
    started: float = 0.0
    forked: float = 0.0
    experts: float = 0.0
    """The share of a plain pass that reads experts."""
    chosen: float = 1.0
    """The share of all experts that a token chooses."""

    @classmethod
    def of(
        cls,
        drafter: int,
        target: int,
        device: str,
        aux_tokens: int = 0,
        experts: tuple[float, float] = (0.0, 0.0),
    ) -> NominalCosts:
        """Returns the costs for bytes of weights that a pass of each reads; drafter: 0 for one that
        is no model. device: its kind. aux_tokens: columns after the root and each node. experts: as
        `Target.expert_bytes`."""
        scored = CPU_TOKEN_COST if device == "cpu" else TOKEN_COST
        whole = target + PASS_OVERHEAD
        return cls(
            level=(drafter + PASS_OVERHEAD) / whole if drafter else 0.0,
            node=scored * (1 + aux_tokens),
            started=DRAFT_OVERHEAD / whole + scored * aux_tokens,
            forked=TREE_OVERHEAD / whole,
            experts=experts[0] / whole,
            chosen=experts[1] or 1.0,
        )

    def round(self, nodes: int, levels: int) -> float:
        """Returns what a round costs that drafts this many nodes in this many levels."""
        if not nodes:
            return 1.0
        drafted = self.started + self.level * levels + self.forked * (nodes > levels)
        return 1 + drafted + self.node * nodes + self._of_experts(nodes)

    def _of_experts(self, nodes: int) -> float:
        """Returns what reading the experts costs that a plain pass does not read: each token
        chooses its own, any with the same chance."""
        if not self.experts:
            return 0.0
        read = (1 - (1 - self.chosen) ** (1 + nodes)) / self.chosen
        return self.experts * (read - 1)
