"""The text that will probably end soonest goes first.

Zhao and Wang 2024, "ALISE: accelerating large language model serving with speculative scheduling"
(arXiv 2410.23537): lengths are predicted, and the shortest text is served first, with ageing. What
is left out of it: texts that are being written are not put aside for shorter ones, since a free row
comes soon and reading a text again costs a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from outpace.engine.order.base import Order
from outpace.engine.order.lengths import LengthEstimator
from outpace.engine.request import Request

PATIENCE = 4
"""A text goes before everybody who comes later, once it has waited for so many times as many rounds
as it will probably have tokens."""


@dataclass(frozen=True)
class _Arrival:
    predicted: float  # tokens
    round: int


class Shortest(Order):
    """The fewest predicted tokens first, counted with the time of arrival, so that nobody waits for
    ever.

    A request is sorted by ``predicted + round of arrival / PATIENCE``. Only those can overtake a
    text of n predicted tokens that come within ``PATIENCE * n`` rounds after it.
    """

    name = "shortest"

    def __init__(self, estimator: LengthEstimator | None = None) -> None:
        self.estimator = estimator or LengthEstimator()
        self._rounds = 0
        self._arrivals: WeakKeyDictionary[Request, _Arrival] = WeakKeyDictionary()

    def key(self, request: Request) -> tuple[float, ...]:
        arrival = self._arrivals[request]
        written = len(request.output_ids)
        # A text that is longer than predicted will probably go on for some part of what it has.
        left = max(arrival.predicted - written, written / 2)
        return (left + arrival.round / PATIENCE,)

    def arrives(self, request: Request) -> None:
        self._arrivals[request] = _Arrival(self.estimator.predict(request), self._rounds)

    def played(self, requests: Sequence[Request]) -> None:
        self._rounds += 1
        for request in requests:
            if request.finished:
                self.estimator.learn(request)
