"""Requests that wait, in the lines of an order: the next one is found without a look at all."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from threading import Lock

from outpace.engine.order.base import Order
from outpace.engine.request import Request

Entry = tuple[tuple[float, ...], int, int, Request]
"""What a request is sorted by in its line, its number, how many were added before it, itself."""


class Waiting:
    """The requests that wait; any thread may add one at any time.

    To find the next one takes time in proportion to the lines, and not to the requests: all but one
    order have a single line.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._lock = Lock()
        self._added = count()
        self._entries: dict[Request, Entry] = {}
        # Heaps, in which entries of requests that have left may still stand.
        self._lines: dict[Hashable, list[Entry]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._entries))

    @property
    def first(self) -> Request | None:
        """The request that comes first."""
        with self._lock:
            firsts = ((line, self._first_in(line)) for line in list(self._lines))
            found = [(*self._order.line_key(line), *entry) for line, entry in firsts if entry]
            request: Request | None = min(found)[-1] if found else None  # type: ignore[assignment]
            return request

    def add(self, request: Request) -> None:
        """Adds a request, or sorts in anew one that is there."""
        with self._lock:
            entry = self._order.key(request), request.id, next(self._added), request
            self._entries[request] = entry
            heappush(self._lines.setdefault(self._order.line_of(request), []), entry)

    def take_out(self, request: Request) -> None:
        """Takes out a request; ``KeyError`` where it is not there."""
        with self._lock:
            del self._entries[request]

    def drop(self, requests: Iterable[Request]) -> None:
        """Takes out those of the requests that are there, and forgets all that have left."""
        with self._lock:
            for request in requests:
                self._entries.pop(request, None)
            lines: dict[Hashable, list[Entry]] = {}
            for request, entry in self._entries.items():
                lines.setdefault(self._order.line_of(request), []).append(entry)
            for line in lines.values():
                heapify(line)
            self._lines = lines

    def _first_in(self, line: Hashable) -> Entry | None:
        """The first entry of a line that is still there; forgets a line without any."""
        heap = self._lines[line]
        while heap and self._entries.get(heap[0][-1]) is not heap[0]:
            heappop(heap)
        if heap:
            return heap[0]
        del self._lines[line]
        return None
