"""Does a drafter keep to what it says and was told? Its distributions, its budgets and its own
context."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from outpace.audit.betting.sequential import Echoes, SequentialTest, Tilts
from outpace.audit.betting.text_test import places
from outpace.core.proposal import Proposal, Sampled
from outpace.draft.base import Rows
from outpace.engine.trace import RoundTrace

DEPTHS = 8
"""Depths that have bets of their own."""


class ClaimTest:
    """An observer of an engine that bets on sampled nodes against their row of q: which tokens, at
    which depth, and whether a draw is an earlier one of the same text again (a stream that was used
    before).

    ``breaches`` counts, by what is wrong in words, the proposals of more nodes than the row's
    budget, or deeper than the drafter's own context reaches.
    """

    def __init__(self, alpha: float, context: int | None = None) -> None:
        """context: positions that the drafter's model has, if it runs one."""
        self.test = SequentialTest(alpha)
        self.breaches: Counter[str] = Counter()
        self._context = context
        self._ranks = self.test.stake("which drafted tokens", 0.4, Tilts())
        self._depths = [
            self.test.stake(f"drafted tokens at depth {depth + 1}", 0.3 / DEPTHS, Tilts())
            for depth in range(DEPTHS)
        ]
        self._echoes = self.test.stake("draws that repeat an earlier round's", 0.3, Echoes())
        self._earlier: dict[tuple[int, int], float] = {}

    def __call__(self, trace: RoundTrace) -> None:
        self.breaches.update(self._too_much(trace))
        self.observe(trace.rows, trace.proposal)

    def _too_much(self, trace: RoundTrace) -> Iterator[str]:
        proposal = trace.proposal
        depths = torch.where(proposal.valid, proposal.tree.depth[:, 1:], 0)
        for row, nodes in enumerate(proposal.counts.tolist()):
            if nodes > trace.budgets[row]:
                yield f"proposals of {nodes} nodes where {trace.budgets[row]} are allowed"
            last = trace.rows.length(row) + max(depths[row].tolist(), default=0)
            end = self._context
            if nodes and end is not None and last > end:
                yield f"drafts to position {last} where the drafter's context ends at {end}"

    def observe(self, rows: Rows, proposal: Proposal) -> None:
        """Bets on one round's proposal; point proposals claim nothing."""
        if not isinstance(proposal.distribution, Sampled):
            return
        q = _given_elders(proposal).double()
        mass, by_rank, by_number = places(q, proposal.tokens)
        keys = list(zip(rows.seeds.tolist(), rows.positions.tolist(), strict=True))
        drawn: dict[tuple[int, int], float] = {}
        for row, node, depth in _drawn_nodes(proposal, q):
            impossible = float(mass[row, node]) <= 0
            if not impossible:
                low, high = by_rank[row, node].tolist()
                self._ranks.observe(low, high)
                self._depths[min(depth, DEPTHS) - 1].observe(low, high)
                seed, position = keys[row]
                place = (seed, position + depth)
                low, high = by_number[row, node].tolist()
                if place in self._earlier:
                    self._echoes.observe(self._earlier[place], low, high)
                drawn.setdefault(place, (low + high) / 2)
            self.test.settle(impossible)
        # Only now: siblings and cousins of one round are no earlier draws.
        self._earlier.update(drawn)


def _drawn_nodes(proposal: Proposal, q: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yields row, node (from 0) and depth of every node that was drawn from something."""
    distribution = proposal.distribution
    given = distribution.given if isinstance(distribution, Sampled) else None
    drawn = proposal.valid & (q.sum(-1) > 0)
    real = (drawn if given is None else drawn & ~given).nonzero().tolist()
    depth = proposal.tree.depth.tolist()
    for row, node in real:
        yield row, node, depth[row][node + 1]


def _given_elders(proposal: Proposal) -> Tensor:
    """``[B, N, V]``: each node's distribution given its elder siblings, unnormalised."""
    distribution = proposal.distribution
    assert isinstance(distribution, Sampled)
    if distribution.with_replacement:
        return distribution.q
    q, parents = distribution.q.clone(), proposal.tree.parents
    for node in range(1, proposal.tree.size):
        same = (parents[:, :node] == parents[:, node : node + 1]).to(q.dtype)  # [B, node]
        taken = torch.zeros_like(q[:, 0]).scatter_add(1, proposal.tokens[:, :node], same)
        q[:, node] = q[:, node].masked_fill(taken > 0, 0.0)
    return q
