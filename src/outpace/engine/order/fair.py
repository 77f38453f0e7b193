"""Each client gets as much as any other.

Sheng et al. 2024, "Fairness in serving large language models" (arXiv 2401.00588): the virtual token
counter.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from weakref import WeakKeyDictionary

from outpace.engine.order.base import Order
from outpace.engine.request import Request

READ, WRITTEN = 1, 2
"""What a token of a prompt and one of a text count; the paper's weights."""

REMEMBERED = 4096
"""Clients whose counters are kept."""


class Fair(Order):
    """The client that was given the fewest tokens goes first, and its requests as they came.

    A client that has been away begins again where the least of the others stands: time away earns
    no credit, by which it would go before everybody until it had caught up. Whoever gives a
    request no `Request.client` shares one place with all others who do not.
    """

    name = "fair"

    def __init__(self) -> None:
        self._lock = threading.Lock()  # requests arrive in any thread, while another one plays
        self._given: OrderedDict[Hashable, float] = OrderedDict()  # the longest idle one first
        # Of requests that have not ended, the part of their tokens that was counted.
        self._counted: WeakKeyDictionary[Request, float] = WeakKeyDictionary()

    def key(self, request: Request) -> tuple[float, ...]:
        return ()

    def line_of(self, request: Request) -> Hashable:
        return request.client

    def line_key(self, line: Hashable) -> tuple[float, ...]:
        return (self._given.get(line, 0.0),)

    def arrives(self, request: Request) -> None:
        with self._lock:
            active = {one.client for one in self._counted if not one.finished}
            if request.client not in active:
                floor = min((self._given[client] for client in active), default=self._furthest())
                self._given[request.client] = max(floor, self._given.get(request.client, 0.0))
            self._counted[request] = 0.0
            self._given.move_to_end(request.client)
            self._forget(active | {request.client})

    def joins(self, request: Request) -> None:
        with self._lock:
            self._count(request)

    def played(self, requests: Sequence[Request]) -> None:
        with self._lock:
            for request in requests:
                self._count(request)
                if request.finished:
                    self._counted.pop(request, None)

    def _count(self, request: Request) -> None:
        """Adds what the request has got since it was last counted; its prompt counts once."""
        if request not in self._counted:
            return
        cost = READ * len(request.prompt_ids) + WRITTEN * len(request.output_ids)
        self._given[request.client] += cost - self._counted[request]
        self._counted[request] = cost

    def _furthest(self) -> float:
        """Where a client begins while nobody else is there: as far as the one that got most."""
        return max(self._given.values(), default=0.0)

    def _forget(self, active: set[Hashable]) -> None:
        idle = [client for client in self._given if client not in active]
        for client in idle[: max(0, len(self._given) - REMEMBERED)]:
            del self._given[client]
