"""The queue of requests that wait, and the limit on the tokens that all rows hold."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from threading import Lock

from outpace.engine.request import EngineRequest
from outpace.engine.scheduling_policies import FCFSPolicy, SchedulingPolicy

Entry = tuple[tuple[float, ...], int, int, EngineRequest]
"""What a request is sorted by in its line, its number, how many were added before it, itself."""


class WaitingQueue:
    """The requests that wait; any thread may add one at any time.

    To find the next one takes time in proportion to the lines, and not to the requests: all but one
    policy have a single line.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._lock = Lock()
        self._added = count()
        self._entries: dict[EngineRequest, Entry] = {}
        # Heaps, in which entries of requests that have left may still stand.
        self._lines: dict[Hashable, list[Entry]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[EngineRequest]:
        return iter(list(self._entries))

    @property
    def first(self) -> EngineRequest | None:
        """The request that comes first."""
        with self._lock:
            firsts = ((line, self._first_in(line)) for line in list(self._lines))
            found = [(*self._policy.line_key(line), *entry) for line, entry in firsts if entry]
            request: EngineRequest | None = min(found)[-1] if found else None  # type: ignore[assignment]
            return request

    def add(self, request: EngineRequest) -> None:
        """Adds a request, or sorts in anew one that is there."""
        with self._lock:
            entry = self._policy.key(request), request.id, next(self._added), request
            self._entries[request] = entry
            heappush(self._lines.setdefault(self._policy.line_of(request), []), entry)

    def take_out(self, request: EngineRequest) -> None:
        """Takes out a request; ``KeyError`` where it is not there."""
        with self._lock:
            del self._entries[request]

    def drop(self, requests: Iterable[EngineRequest]) -> None:
        """Takes out those of the requests that are there, and forgets all that have left."""
        with self._lock:
            for request in requests:
                self._entries.pop(request, None)
            lines: dict[Hashable, list[Entry]] = {}
            for request, entry in self._entries.items():
                lines.setdefault(self._policy.line_of(request), []).append(entry)
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


HEADROOM = 32
"""Tokens that are kept free for each row, at least: what a round may add to it, its draft
included."""


class RequestQueue:
    """The requests that wait for a row.

    A request that has been in the batch already, and was put back because a step was interrupted,
    goes before all others: its text has begun.

    >>> queue = RequestQueue()
    >>> len(queue), queue.first
    (0, None)
    """

    def __init__(self, policy: SchedulingPolicy | None = None) -> None:
        self.policy = policy or FCFSPolicy()
        self._back: list[EngineRequest] = []  # were in the batch, in the order of their rows
        self._waiting = WaitingQueue(self.policy)

    def __len__(self) -> int:
        return len(self._back) + len(self._waiting)

    def __iter__(self) -> Iterator[EngineRequest]:
        return iter([*self._back, *self._waiting])

    @property
    def first(self) -> EngineRequest | None:
        """The request that joins next."""
        return self._back[0] if self._back else self._waiting.first

    def place(self, request: EngineRequest) -> tuple[float, ...]:
        """Returns what requests are sorted by: their line's key and their own, then the time of
        arrival."""
        policy = self.policy
        return (*policy.line_key(policy.line_of(request)), *policy.key(request), request.id)

    def add(self, request: EngineRequest) -> None:
        """Adds a request that has just arrived."""
        self.policy.on_arrival(request)
        self._waiting.add(request)

    def put_back(self, requests: Iterable[EngineRequest]) -> None:
        """Adds requests that were in the batch, before all others and in this order. Some of them
        may be here already, if an interruption came while they were joining or leaving it."""
        again = list(requests)
        self._waiting.drop(again)
        self._back = [*again, *(one for one in self._back if one not in again)]

    def preempt(self, request: EngineRequest) -> None:
        """Adds a request that has to leave the batch, where it would stand had it never joined."""
        request.preemptions += 1
        self._waiting.add(request)

    def join(self, request: EngineRequest) -> None:
        """Takes out a request that takes a row."""
        if request in self._back:
            self._back.remove(request)
        else:
            self._waiting.take_out(request)
        self.policy.on_admission(request)

    def drop_finished(self) -> None:
        """Takes out all requests that have ended while they waited."""
        self._back = [one for one in self._back if not one.finished]
        self._waiting.drop([one for one in self._waiting if one.finished])


class TokenLimit:
    """How many tokens of prompts and texts all rows may hold together.

    >>> TokenLimit(None).exceeded([])
    False
    """

    def __init__(self, limit: int | None) -> None:
        """limit: a single row always has room; None: there is no limit."""
        self._limit = limit
        self._headroom = HEADROOM

    def note_drafts(self, budgets: Iterable[int]) -> None:
        """Takes how many tokens each row drafts in this round: as much is kept free for each
        until the next one."""
        self._headroom = max([HEADROOM, *(1 + budget for budget in budgets)])

    def admits(self, running: Sequence[EngineRequest], request: EngineRequest) -> bool:
        """Whether one more request may join, so that nobody has to leave in the next rounds."""
        together = [*running, request]
        return (
            not running
            or self._limit is None
            or self._need(together, self._headroom) <= self._limit
        )

    def exceeded(self, running: Sequence[EngineRequest]) -> bool:
        """Whether a request has to leave before the next round."""
        return len(running) > 1 and self._limit is not None and self._need(running) > self._limit

    def _need(self, requests: Sequence[EngineRequest], spare: int = 0) -> int:
        return sum(request.length + self._headroom + spare for request in requests)
