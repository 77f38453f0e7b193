"""Two more after a full acceptance, one less otherwise: transformers' schedules.

``num_assistant_tokens_schedule`` of assisted generation in transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from outpace.core.request import PerRequest, Request
from outpace.policy.base import Outcome
from outpace.policy.lengths.base import LONGEST, LengthPolicy

MORE, LESS = 2, 1


class Heuristic(LengthPolicy):
    """Drafts `MORE` tokens more once all of a draft were accepted, else `LESS` fewer, at least one.

    A new request goes on where the others are.
    """

    name: ClassVar[str] = "heuristic"
    usual: ClassVar[int] = 5
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
