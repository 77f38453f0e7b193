"""In which order waiting requests join the batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

from outpace.engine.request import Request


class Order(ABC):
    """Compares waiting requests: the one with the smallest key joins first."""

    name: str

    @abstractmethod
    def key(self, request: Request) -> tuple[float, ...]:
        """Returns what the request is sorted by. Ties are broken by the time of arrival."""


class FirstCome(Order):
    """First come, first served."""

    name = "fcfs"

    def key(self, request: Request) -> tuple[float, ...]:
        return ()


class ByPriority(Order):
    """The smallest number first, as in vLLM; equal ones as they come."""

    name = "priority"

    def key(self, request: Request) -> tuple[float, ...]:
        return (request.priority,)


ORDERS: dict[str, type[Order]] = {order.name: order for order in (FirstCome, ByPriority)}
"""Each order by its name."""


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
        self._waiting: list[Request] = []  # as they arrived

    def __len__(self) -> int:
        return len(self._back) + len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter([*self._back, *self._waiting])

    @property
    def first(self) -> Request | None:
        """The request that joins next."""
        if self._back:
            return self._back[0]
        return min(self._waiting, key=self.order.key, default=None)  # the earliest of equals

    def add(self, request: Request) -> None:
        """Adds a request that has just arrived."""
        self._waiting.append(request)

    def put_back(self, requests: Iterable[Request]) -> None:
        """Adds requests that were in the batch, before all others and in this order."""
        self._back[:0] = requests

    def remove(self, request: Request) -> None:
        """Takes out a request that joins the batch, or has ended before it could."""
        (self._back if request in self._back else self._waiting).remove(request)
