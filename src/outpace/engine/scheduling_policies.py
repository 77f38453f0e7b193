"""Scheduling policies: which waiting request joins the batch next."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from outpace.engine.lengths import LengthEstimator
from outpace.engine.request import EngineRequest


class SchedulingPolicy(ABC):
    """Compares requests, which stand in lines: of the line with the smallest key the request with
    the smallest key joins first, and is preempted last.

    What a policy learns from requests that come and rounds that are run changes when a text is
    written, and never what it says.
    """

    name: str

    @abstractmethod
    def key(self, request: EngineRequest) -> tuple[float, ...]:
        """Returns what the request is sorted by in its line, which stays the same while it waits.
        Ties are broken by the time of arrival."""

    def line_of(self, request: EngineRequest) -> Hashable:
        """Returns the line that the request stands in, for good."""
        return None

    def line_key(self, line: Hashable) -> tuple[float, ...]:
        """Returns what lines are sorted by, which may change at any time."""
        return ()

    def on_arrival(self, request: EngineRequest) -> None:
        """Learns of a request that begins to wait."""

    def on_admission(self, request: EngineRequest) -> None:
        """Learns of a request that takes a row; of one that was preempted, each time."""

    def on_round_end(self, requests: Sequence[EngineRequest]) -> None:
        """Learns of a round. The requests have their new tokens, and some may have ended."""


class FCFSPolicy(SchedulingPolicy):
    """First come, first served."""

    name = "fcfs"

    def key(self, request: EngineRequest) -> tuple[float, ...]:
        return ()


class PriorityPolicy(SchedulingPolicy):
    """The smallest number first, as in vLLM; equal ones as they come."""

    name = "priority"

    def key(self, request: EngineRequest) -> tuple[float, ...]:
        return (request.priority,)


READ, WRITTEN = 1, 2
"""What a token of a prompt and one of a text count; the paper's weights."""

REMEMBERED = 4096
"""Clients whose counters are kept."""


class FairPolicy(SchedulingPolicy):
    """The client that was given the fewest tokens goes first, and its requests as they came.

    Sheng et al. 2024, "Fairness in serving large language models" (arXiv 2401.00588): the virtual
    token counter.

    A client that has been away begins again where the least of the others stands: time away earns
    no credit, by which it would go before everybody until it had caught up. Whoever gives a
    request no `EngineRequest.client` shares one place with all others who do not.
    """

    name = "fair"

    def __init__(self) -> None:
        # Requests arrive in any thread, while another one runs rounds.
        self._lock = threading.Lock()
        self._given: OrderedDict[Hashable, float] = OrderedDict()  # the longest idle one first
        # Of requests that have not ended, the part of their tokens that was counted.
        self._counted: WeakKeyDictionary[EngineRequest, float] = WeakKeyDictionary()

    def key(self, request: EngineRequest) -> tuple[float, ...]:
        return ()

    def line_of(self, request: EngineRequest) -> Hashable:
        return request.client

    def line_key(self, line: Hashable) -> tuple[float, ...]:
        return (self._given.get(line, 0.0),)

    def on_arrival(self, request: EngineRequest) -> None:
        with self._lock:
            active = {one.client for one in self._counted if not one.finished}
            if request.client not in active:
                # While nobody else is there: as far as the one that got most.
                furthest = max(self._given.values(), default=0.0)
                floor = min((self._given[client] for client in active), default=furthest)
                self._given[request.client] = max(floor, self._given.get(request.client, 0.0))
            self._counted[request] = 0.0
            self._given.move_to_end(request.client)
            self._forget(active | {request.client})

    def on_admission(self, request: EngineRequest) -> None:
        with self._lock:
            self._count(request)

    def on_round_end(self, requests: Sequence[EngineRequest]) -> None:
        with self._lock:
            for request in requests:
                self._count(request)
                if request.finished:
                    self._counted.pop(request, None)

    def _count(self, request: EngineRequest) -> None:
        """Adds what the request has got since it was last counted; its prompt counts once."""
        if request not in self._counted:
            return
        cost = READ * len(request.prompt_ids) + WRITTEN * len(request.output_ids)
        given = self._given.get(request.client, 0.0)  # one may be forgotten while it is written for
        self._given[request.client] = given + cost - self._counted[request]
        self._counted[request] = cost

    def _forget(self, active: set[Hashable]) -> None:
        idle = [client for client in self._given if client not in active]
        for client in idle[: max(0, len(self._given) - REMEMBERED)]:
            del self._given[client]


PATIENCE = 4
"""A text goes before everybody who comes later, once it has waited for ``PATIENCE`` rounds for each
token that it will probably have."""


@dataclass(frozen=True)
class _Arrival:
    predicted: float  # tokens
    round: int


class ShortestFirstPolicy(SchedulingPolicy):
    """The fewest predicted tokens first, counted with the time of arrival, so that nobody waits for
    ever.

    A request is sorted by ``predicted + round of arrival / PATIENCE``. Only those can overtake a
    text of n predicted tokens that come within ``PATIENCE * n`` rounds after it.

    Zhao and Wang 2024, "ALISE: accelerating large language model serving with speculative
    scheduling" (arXiv 2410.23537): lengths are predicted, and the shortest text is served first,
    with ageing. What is left out of it: texts that are being written are not preempted for shorter
    ones, since a free row comes soon and reading a text again costs a pass.
    """

    name = "shortest"

    def __init__(self, estimator: LengthEstimator | None = None) -> None:
        self.estimator = estimator or LengthEstimator()
        self._rounds = 0
        self._arrivals: WeakKeyDictionary[EngineRequest, _Arrival] = WeakKeyDictionary()

    def key(self, request: EngineRequest) -> tuple[float, ...]:
        arrival = self._arrivals[request]
        written = len(request.output_ids)
        # A text that is longer than predicted will probably go on for some part of what it has.
        left = max(arrival.predicted - written, written / 2)
        return (left + arrival.round / PATIENCE,)

    def on_arrival(self, request: EngineRequest) -> None:
        self._arrivals[request] = _Arrival(self.estimator.predict(request), self._rounds)

    def on_round_end(self, requests: Sequence[EngineRequest]) -> None:
        self._rounds += 1
        for request in requests:
            if request.finished:
                self.estimator.learn(request)


SCHEDULING_POLICIES: dict[str, type[SchedulingPolicy]] = {
    "fcfs": FCFSPolicy,
    "priority": PriorityPolicy,
    "fair": FairPolicy,
    "shortest": ShortestFirstPolicy,
}
"""Each policy by its name."""
