"""Which requests are in the batch: a queue of those that wait, and room for those that write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from outpace.engine.order.base import Order
from outpace.engine.order.simple import FirstCome
from outpace.engine.order.waiting import Waiting
from outpace.engine.request import Request

AHEAD = 32
"""Tokens that are kept free for each row: what a round may add to it, its draft included."""


class Queue:
    """The requests that wait for a row.

    A request that has been in the batch already, and was put back because a step was interrupted,
    goes before all others: its text has begun.

    >>> queue = Queue()
    >>> len(queue), queue.first
    (0, None)
    """

    def __init__(self, order: Order | None = None) -> None:
        self.order = order or FirstCome()
        self._back: list[Request] = []  # were in the batch, in the order of their rows
        self._waiting = Waiting(self.order)

    def __len__(self) -> int:
        return len(self._back) + len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter([*self._back, *self._waiting])

    @property
    def first(self) -> Request | None:
        """The request that joins next."""
        return self._back[0] if self._back else self._waiting.first

    def place(self, request: Request) -> tuple[float, ...]:
        """Returns what requests are sorted by: their line's key and their own, then the time of
        arrival."""
        order = self.order
        return (*order.line_key(order.line_of(request)), *order.key(request), request.id)

    def add(self, request: Request) -> None:
        """Adds a request that has just arrived."""
        self.order.arrives(request)
        self._waiting.add(request)

    def put_back(self, requests: Iterable[Request]) -> None:
        """Adds requests that were in the batch, before all others and in this order. Some of them
        may be here already, if an interruption came while they were joining or leaving it."""
        again = list(requests)
        self._waiting.drop(again)
        self._back = [*again, *(one for one in self._back if one not in again)]

    def put_aside(self, request: Request) -> None:
        """Adds a request that has to leave the batch, where it would stand had it never joined."""
        request.preemptions += 1
        self._waiting.add(request)

    def join(self, request: Request) -> None:
        """Takes out a request that takes a row."""
        if request in self._back:
            self._back.remove(request)
        else:
            self._waiting.take_out(request)
        self.order.joins(request)

    def drop_finished(self) -> None:
        """Takes out all requests that have ended while they waited."""
        self._back = [one for one in self._back if not one.finished]
        self._waiting.drop([one for one in self._waiting if one.finished])


class Room:
    """How many tokens of prompts and texts all rows may hold together.

    >>> Room(None).lacks([])
    False
    """

    def __init__(self, limit: int | None) -> None:
        """limit: a single row always has room; None: there is no limit."""
        self._limit = limit

    def holds(self, running: Sequence[Request], request: Request) -> bool:
        """Whether one more request may join, so that nobody has to leave in the next rounds."""
        together = [*running, request]
        return not running or self._limit is None or self._need(together, AHEAD) <= self._limit

    def lacks(self, running: Sequence[Request]) -> bool:
        """Whether a request has to leave before the next round."""
        return len(running) > 1 and self._limit is not None and self._need(running) > self._limit

    def _need(self, requests: Sequence[Request], spare: int = 0) -> int:
        return sum(request.length + AHEAD + spare for request in requests)
