"""Lengths that are the same in every round, or follow from what earlier rounds accepted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Ge

from outpace.core.options import Options
from outpace.core.request import PerRequest, Request
from outpace.core.trees.tree_shape import TreeShape
from outpace.draft.round import Outcome
from outpace.policy.lengths.base import LONGEST, LengthPolicy


class Constant(LengthPolicy):
    """The same number for every round. shape: of what is drafted, if the drafter leaves it open."""

    name: ClassVar[str] = "constant"
    default_count: ClassVar[int] = 5

    def __init__(
        self,
        count: int,
        options: object = None,
        *,
        shape: TreeShape | None = None,
    ) -> None:
        super().__init__(count, options or Options())
        self._shape = shape

    @classmethod
    def without_drafter(cls) -> Constant:
        """Returns the policy of plain decoding."""
        none = cls(0)
        none.has_drafter = False
        return none

    def budgets(self, requests: Sequence[Request]) -> list[int]:
        return [self.count] * len(requests)


MORE, LESS = 2, 1


class Heuristic(LengthPolicy):
    """Drafts `MORE` tokens more once all of a draft were accepted, else `LESS` fewer, at least one.

    A new request goes on where the others are.

    ``num_assistant_tokens_schedule`` of assisted generation in transformers.
    """

    name: ClassVar[str] = "heuristic"
    default_count: ClassVar[int] = 5
    afresh: ClassVar[bool] = False

    def __init__(self, count: int, options: object) -> None:
        super().__init__(count, options)
        self._latest = count
        self._lengths = PerRequest(self._first, lasting=True)

    def _first(self, request: Request) -> int:
        """The length that a request begins with: that of the others, unless its text must repeat
        itself."""
        return self.count if self.afresh or request.reproducible else self._latest

    @property
    def most(self) -> int:
        return max(LONGEST, self.count)

    def budgets(self, requests: Sequence[Request]) -> list[int]:
        return [self._lengths[request] for request in requests]

    def learn(self, request: Request, outcome: Outcome) -> None:
        length = self._lengths[request]
        full = outcome.accepted == outcome.depth
        length = min(self.most, length + MORE) if full else max(1, length - LESS)
        self._lengths[request] = length
        if not request.reproducible:
            self._latest = length


class TransientHeuristic(Heuristic):
    """The same, and every request begins anew."""

    name: ClassVar[str] = "heuristic_transient"
    afresh: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class BatchOptions(Options):
    """What a user may set; the defaults are the paper's."""

    more: Annotated[int, Ge(1)] = 2
    """Tokens more after a round in which a row accepted all of its draft."""
    share: Annotated[int, Ge(1)] = 10
    """After any other round the length shrinks by one token in this many."""
    longest: Annotated[int | None, Ge(1)] = None
    """Tokens of the longest draft; unset: 32, or as many as the first has."""


@dataclass(frozen=True)
class _BatchState:
    length: int
    shrank: bool = False  # in the last round

    def after(self, full: bool, accepted: int, options: BatchOptions, longest: int) -> _BatchState:
        """Returns the state after a round. full: a row accepted all of its draft; accepted: the
        most that a row accepted; longest: the longest draft."""
        if full:
            return _BatchState(min(self.length + options.more, longest))
        shorter = self.length - math.ceil(self.length / options.share) - self.shrank
        return _BatchState(max(1, accepted, shorter), shrank=True)


class Bass(LengthPolicy):
    """Grows the length of all rows if any of them accepted its whole draft, and else shrinks it,
    faster the second time, but never below what some row accepted.

    A sampled row with a seed of its own goes by its own rounds alone, as a batch of one row.

    Qian et al. 2024, "BASS: batched attention-optimized speculative sampling" (arXiv 2404.15778),
    algorithm 1.
    """

    name: ClassVar[str] = "batch"
    default_count: ClassVar[int] = 7
    Options: ClassVar[type[Any]] = BatchOptions

    def __init__(self, count: int, options: Any) -> None:
        super().__init__(count, options)
        first = _BatchState(min(count, self.most))
        self._states = PerRequest(lambda request: first, lasting=True, common=first)

    @property
    def most(self) -> int:
        longest: int | None = self.options.longest
        return max(LONGEST, self.count) if longest is None else longest

    def budgets(self, requests: Sequence[Request]) -> list[int]:
        return [self._states[request].length for request in requests]

    def learn_round(self, requests: Sequence[Request], outcomes: Sequence[Outcome]) -> None:
        together = []
        for request, outcome in zip(requests, outcomes, strict=True):
            if not outcome.drafted or request.finished:
                continue
            if request.reproducible:
                self._learn(request, [outcome])
            else:
                together.append((request, outcome))
        if together:
            self._learn(together[0][0], [outcome for _, outcome in together])

    def _learn(self, request: Request, outcomes: Sequence[Outcome]) -> None:
        full = any(outcome.accepted == outcome.depth for outcome in outcomes)
        accepted = max(outcome.accepted for outcome in outcomes)
        state = self._states[request].after(full, accepted, self.options, self.most)
        self._states[request] = state
