"""Bets on each token of the texts against the distribution of plain decoding, and on each sampled
node of the drafts against the one that the drafter states."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outpace.audit.power import Design
from outpace.audit.sequential import (
    RARE,
    Array,
    Chances,
    Echoes,
    SequentialTest,
    Tables,
    Tilts,
)
from outpace.core.logits_pipeline import Branches, History, LogitsPipeline, RowOptions
from outpace.core.proposal import Proposal, Sampled
from outpace.draft.base import Round, Rows
from outpace.targets.base import Target


@dataclass(frozen=True, eq=False)
class Step:
    """The distributions of one position of several texts that share a prompt."""

    position: int
    rows: list[int]  # which of the texts reach this position
    probs: Tensor  # [R, V] float64
    forbidden: Tensor  # [R, V] bool: what the options forbid, however the logits are rounded


@dataclass(frozen=True, eq=False)
class PlainProbs:
    """What plain decoding draws each token from, under one request's resolved options."""

    target: Target
    options: RowOptions
    vocabulary: int

    def __call__(self, prompt: Sequence[int], texts: Sequence[Sequence[int]]) -> Iterator[Step]:
        """Yields the distributions of the texts' tokens, position by position."""
        logits = [
            self.target.forward_uncached([*prompt, *text[:-1]], last=len(text)) for text in texts
        ]
        for position in range(max(len(text) for text in texts)):
            rows = [row for row, text in enumerate(texts) if len(text) > position]
            here = torch.stack([logits[row][position] for row in rows])[:, None]
            yield self._step(position, rows, here, prompt, texts)

    def _step(
        self,
        position: int,
        rows: list[int],
        logits: Tensor,
        prompt: Sequence[int],
        texts: Sequence[Sequence[int]],
    ) -> Step:
        history = History([prompt] * len(rows), [texts[row][:position] for row in rows])
        root = Branches.root(len(rows), logits.device)
        pipeline = LogitsPipeline([self.options] * len(rows), self.vocabulary, logits.device)
        probs = pipeline(logits, root, history)[:, 0].double().cpu()
        scores = pipeline.process_logits(logits, root, history)[:, 0]
        return Step(position, rows, probs, scores.isneginf().cpu())


# -- the text test -----------------------------------------------------------------------------


BINS = 7
"""How many of the most probable tokens have a bin of their own in the tables; all others share
one."""
CUT = 1e-4
"""Share of tokens that may be among those that top_k, top_p and the like cut off: rounding can
decide about a token at the very edge. A greater share is a deviation."""


def places(distribution: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the probability of tokens ``[...]`` and twice the part of [0, 1] that they take,
    ``[..., 2]``: with all tokens side by side from the most probable to the least, and by number.

    distribution: ``[..., V]``, need not be normalised.
    """
    total = distribution.sum(-1).clamp(min=1e-300)
    mass = distribution.gather(-1, tokens[..., None])
    number = torch.arange(distribution.shape[-1], device=distribution.device)
    before = number < tokens[..., None]
    above = (distribution > mass) | ((distribution == mass) & before)
    shares = []
    for order in (above, before):
        low = (distribution * order).sum(-1) / total
        high = (low + mass[..., 0] / total).clamp(max=1)
        shares.append(torch.stack([low.clamp(max=1), high], -1))
    return mass[..., 0] / total, shares[0], shares[1]


class TextTest:
    """Bets on the tokens of texts. ``test`` has the wealth; ``design`` the distributions met so
    far, from which the power of the test is found."""

    stakes = (0.3, 0.25)
    """Shares of the wealth on the bets on ranks: over all tokens, and by position in the text."""

    def __init__(self, alpha: float, tokens: int, tolerance: float) -> None:
        self.test = SequentialTest(alpha)
        self.slack = math.expm1(2 * tolerance)
        self.design = Design()
        stake, slack = self.test.stake, self.slack
        self._ranks = stake("which tokens", self.stakes[0], Tilts(slack))
        share = self.stakes[1] / tokens
        self._positions = [
            stake(f"which tokens at position {position + 1}", share, Tilts(slack))
            for position in range(tokens)
        ]
        self._tables = stake("tokens after the same text", 0.2, Tables(slack))
        self._again = stake("tokens that stand in the text already", 0.1, Chances(slack))
        self._echoes = stake("tokens that repeat another text's draws", 0.1, Echoes(slack))
        self._cut = stake("tokens that the options cut off", 0.05, Chances(0.0, RARE))
        self._last: dict[int, float] = {}

    def bet_on(
        self, number: int, prompt: Sequence[int], texts: Sequence[Sequence[int]], probs: PlainProbs
    ) -> None:
        """Bets on all tokens of texts that continue the prompt with this number."""
        vocabulary = probs.vocabulary
        cut = [_within(text, vocabulary) for text in texts]
        known = [text for text in cut if text]
        for step in probs(prompt, known) if known else ():
            self._step(number, step, known)

    def _step(self, number: int, step: Step, texts: Sequence[Sequence[int]]) -> None:
        t = step.position
        tokens = torch.tensor([texts[row][t] for row in step.rows])
        mass, by_rank, by_number = (x.tolist() for x in places(step.probs, tokens))
        banned = step.forbidden.gather(1, tokens[:, None])[:, 0].tolist()
        top = step.probs.topk(min(BINS, step.probs.shape[-1]), -1)
        for index, row in enumerate(step.rows):
            distribution, past, token = step.probs[index], texts[row][:t], texts[row][t]
            self.design.add(t, distribution)
            self._cut.observe(CUT, mass[index] <= 0)
            if mass[index] > 0:
                self._ranks.observe(*by_rank[index])
                self._positions[t].observe(*by_rank[index])
                seen = torch.tensor(sorted(set(past)), dtype=torch.long)
                self._again.observe(float(distribution[seen].sum()), token in past)
                self._bet_on_table((number, *past), top.values[index], top.indices[index], token)
                if t in self._last:
                    self._echoes.observe(self._last[t], *by_number[index])
                self._last[t] = sum(by_number[index]) / 2
            self.test.settle(impossible=banned[index])

    def _bet_on_table(self, text: tuple[int, ...], best: Tensor, names: Tensor, token: int) -> None:
        head = best.numpy()
        masses: Array = np.append(head, max(0.0, 1 - head.sum()))
        listed = names.tolist()
        self._tables.observe(text, masses, listed.index(token) if token in listed else len(listed))


def _within(text: Sequence[int], vocabulary: int) -> list[int]:
    """The text up to the first token that does not exist, which `Ending.breaches` reports."""
    for place, token in enumerate(text):
        if token >= vocabulary:
            return list(text[:place])
    return list(text)


# -- the draft test: does a drafter keep to what it states, its budgets and its own context? ---


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

    def __call__(self, trace: Round) -> None:
        self.breaches.update(self._too_much(trace))
        self.observe(trace.rows, trace.proposal)

    def _too_much(self, trace: Round) -> Iterator[str]:
        proposal = trace.proposal
        depths = torch.where(proposal.valid, proposal.tree.depth[:, 1:], 0)
        for row, nodes in enumerate(proposal.counts.tolist()):
            if nodes > trace.budgets[row]:
                yield f"proposals of {nodes} nodes where {trace.budgets[row]} are allowed"
            last = trace.rows.lengths[row] + max(depths[row].tolist(), default=0)
            end = self._context
            if nodes and end is not None and last > end:
                yield f"drafts to position {last} where the drafter's context ends at {end}"

    def observe(self, rows: Rows, proposal: Proposal) -> None:
        """Bets on one round's proposal; deterministic ones claim nothing."""
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
    given = distribution.fixed if isinstance(distribution, Sampled) else None
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
