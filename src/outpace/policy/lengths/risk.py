"""A chain ends once something in it has probably been rejected.

Huang et al. 2024, "SpecDec++" (arXiv 2405.19715), where a trained head predicts acceptance. Here it
is learned from the rounds that are played: how often tokens of a given confidence are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from outpace.core.proposal import EndsBehind
from outpace.draft.base import Drafter
from outpace.draft.exits import probability
from outpace.draft.options import option
from outpace.errors import ConfigError
from outpace.policy.base import Outcome
from outpace.policy.lengths.base import ByRequest, StoppingPolicy, check_number
from outpace.policy.row import DraftingRow

BINS = 10
"""Ranges of confidence of which each has a chance of acceptance."""

BELIEF = 4.0
"""Weight, in tokens, of what is believed of a range before any of its tokens was tested."""


@dataclass(frozen=True)
class Calibration:
    """How many tokens of each range of confidence were tested, and how many accepted."""

    tested: tuple[int, ...] = (0,) * BINS
    accepted: tuple[int, ...] = (0,) * BINS

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
        stands behind the first rejection was not tested."""
        tested, passed = list(self.tested), list(self.accepted)
        for place, each in enumerate(ranges[: accepted + 1]):
            tested[each] += 1
            passed[each] += place < accepted
        return replace(self, tested=tuple(tested), accepted=tuple(passed))


@dataclass(frozen=True, kw_only=True)
class RiskOptions:
    """What a user may set."""

    threshold: float = option(
        0.7, "The chance of any rejection so far above which nothing more is drafted."
    )

    def __post_init__(self) -> None:
        check_number("risk", "threshold", self.threshold, 0, 1)


class Risk(StoppingPolicy):
    """Ends a chain once the chance that any of its tokens is rejected is above ``threshold``.

    A token's chance of acceptance is that of earlier tokens of like confidence, the probability in
    the drafter's law. The token that passes the threshold stays in the draft. All requests learn
    together, except sampled ones with a seed of their own.
    """

    name: ClassVar[str] = "risk"
    usual: ClassVar[int] = 20
    Options: ClassVar[type[Any]] = RiskOptions

    def __init__(self, count: int, options: Any, invariant: bool) -> None:
        super().__init__(count, options, invariant)
        self._known = ByRequest(Calibration(), invariant, pooled=True)
        self._drawn: list[list[Tensor]] = []
        """For each row, a list that its drafter fills in this round. It has a tensor [B] for each
        drafted token: the range of confidence that the token of each row falls into."""
        self._rows: dict[DraftingRow, int] = {}

    def meet(self, drafter: Drafter) -> None:
        if drafter.joins_drafts:
            raise ConfigError(
                f"length='risk' learns from whole chains of one drafter, and method="
                f"{drafter.name!r} has several draft for a row at once: choose another length."
            )

    def calibration(self, request: DraftingRow) -> Calibration:
        """Returns what is known for a request."""
        return self._known.of(request)

    def ending(self, requests: Sequence[DraftingRow]) -> Callable[[Sequence[int]], EndsBehind]:
        self._drawn = [[] for _ in requests]
        self._rows = {request: row for row, request in enumerate(requests)}
        chances = [self.calibration(request).chances() for request in requests]
        return lambda counts: self._watching(counts, chances)

    def _watching(self, counts: Sequence[int], chances: list[list[float]]) -> EndsBehind:
        """What ends one drafter's chains. chances: of each row and range."""
        safe: Tensor | None = None
        drawn: list[Tensor] = []
        tables: list[Tensor] = []  # of the chances, [B, BINS], once it is known where
        for row, count in enumerate(counts):
            if count:
                self._drawn[row] = drawn

        def ends_behind(law: Tensor, token: Tensor) -> Tensor:
            nonlocal safe
            within = (probability(law, token) * BINS).long().clamp(0, BINS - 1)  # [B]
            drawn.append(within)
            if not tables:
                tables.append(torch.tensor(chances, dtype=torch.float64, device=law.device))
            chance = tables[0].gather(1, within[:, None])[:, 0]
            safe = chance if safe is None else safe * chance
            return torch.gt(1 - safe, self.options.threshold)

        return ends_behind

    def learn(self, request: DraftingRow, outcome: Outcome) -> None:
        row = self._rows.get(request)
        if row is None:
            return
        ranges = [int(each[row]) for each in self._drawn[row][: outcome.depth]]
        known = self.calibration(request).with_draft(ranges, outcome.accepted)
        self._known.put(request, known)
