"""How sure a drafter is of its tokens, and how often that comes true."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outpace.core.proposal import EndsAfter
from outpace.core.request import Request
from outpace.draft.exits import probability

BINS = 10
"""Ranges of confidence of which each has a chance of acceptance."""

BELIEF = 4.0
"""Weight, in tokens, of what is believed of a range before any of its tokens was tested."""


@dataclass(frozen=True)
class Calibration:
    """How many tokens of each range of confidence were tested, and how many accepted.

    The confidence in a token is its probability in the drafter's distribution.
    """

    tested: tuple[float, ...] = (0.0,) * BINS
    accepted: tuple[float, ...] = (0.0,) * BINS
    memory: float = 1.0
    """The share of a range's counts that remains at each new token of that range."""

    def chances(self) -> list[float]:
        """Returns the chance that a token of each range is accepted; before any was tested, half
        way between its confidence and certainty."""
        believed = [(1 + (at + 0.5) / BINS) / 2 for at in range(BINS)]
        return [
            (accepted + BELIEF * guess) / (tested + BELIEF)
            for tested, accepted, guess in zip(self.tested, self.accepted, believed, strict=True)
        ]

    def with_draft(self, ranges: Sequence[int], accepted: int) -> Calibration:
        """Returns the counts with one draft more, of which the first ``accepted`` passed. What
        stands after the first rejection was not tested."""
        tested, passed = list(self.tested), list(self.accepted)
        for place, each in enumerate(ranges[: accepted + 1]):
            tested[each] = tested[each] * self.memory + 1
            passed[each] = passed[each] * self.memory + (place < accepted)
        return replace(self, tested=tuple(tested), accepted=tuple(passed))


def ranges_of(sure: Sequence[float]) -> list[int]:
    """Returns the range that each of these falls into, from 0 to 1.

    >>> ranges_of([0.0, 0.25, 1.0])
    [0, 2, 9]
    """
    return [min(BINS - 1, int(one * BINS)) for one in sure]


class Confidences:
    """The confidence in each token that the chains of one round are made of.

    >>> row = object()
    >>> of_round = Confidences([row])
    >>> ends = of_round.watch([2], [Calibration().chances()], lambda safe: safe < 0.8)
    >>> distribution = torch.tensor([[0.25, 0.75]])
    >>> ends(distribution, torch.tensor([1])), ends(distribution, torch.tensor([0]))
    (tensor([False]), tensor([True]))
    >>> of_round.ranges(row, 2)
    [7, 2]
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self._rows = {request: row for row, request in enumerate(requests)}
        self._drawn: list[list[Tensor]] = [[] for _ in requests]
        """For each row, a list that its drafter fills in this round. It has a tensor [B] for each
        drafted token: the range of confidence that the token of each row falls into."""

    def watch(
        self,
        counts: Sequence[int],
        chances: Sequence[Sequence[float]],
        ends: Callable[[Tensor], Tensor],
    ) -> EndsAfter:
        """Returns what ends one drafter's chains, as `DraftingTerms.ends_after` does.

        counts: tokens that each row may have at most. chances: of acceptance, by row and range.
        ends: told for each token in order the chances ``[B]`` that all tokens of the chains so far
        are accepted, says which chains end, ``[B]`` bool.
        """
        safe: Tensor | None = None
        drawn: list[Tensor] = []
        tables: list[Tensor] = []  # of the chances, [B, BINS], once it is known where
        for row, count in enumerate(counts):
            if count:
                self._drawn[row] = drawn

        def ends_after(distribution: Tensor, token: Tensor) -> Tensor:
            nonlocal safe
            within = (probability(distribution, token) * BINS).long().clamp(0, BINS - 1)  # [B]
            drawn.append(within)
            if not tables:
                tables.append(
                    torch.tensor(chances, dtype=torch.float64, device=distribution.device)
                )
            chance = tables[0].gather(1, within[:, None])[:, 0]
            safe = chance if safe is None else safe * chance
            return ends(safe)

        return ends_after

    def ranges(self, request: Request, depth: int) -> list[int] | None:
        """Returns the range of each of the first ``depth`` tokens of a row's chain; None for a
        row whose chain was not watched."""
        row = self._rows.get(request)
        if row is None or not self._drawn[row]:
            return None
        return [int(each[row]) for each in self._drawn[row][:depth]]
