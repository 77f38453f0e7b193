"""The text test: bets on each token of the texts against the distribution of plain decoding."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outpace.audit.betting.power import Design
from outpace.audit.betting.sequential import (
    RARE,
    Array,
    Chances,
    Echoes,
    SequentialTest,
    Tables,
    Tilts,
)
from outpace.audit.pipelines import PlainProbs, Step

BINS = 7
"""N of the most probable tokens have a bin of their own in the tables; all others share
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
