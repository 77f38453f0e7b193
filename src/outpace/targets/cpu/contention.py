"""Fewer threads while other processes use the processors.

The threads of a pass wait for each other about five times per layer. Where another process has
taken the processor of one of them, all wait for it, and two threads can be ten times slower than
one. A busy machine shows in the times that the system takes the processor away from this process.
A token's bits do not depend on the number of threads, so changing it changes no text.
"""

from __future__ import annotations

WINDOW = 16
"""Calls on several threads after which their number is looked at again."""

TAKEN = 16 * WINDOW
"""Times that the processor was taken away within a window, from which on threads are halved. On a
busy machine each wait for another thread counts, some five per layer and so a hundred in a pass; on
a quiet one a long pass over large weights may be disturbed now and then, too."""

FIRST_REST = 256
LONGEST_REST = 1 << 14
"""Calls after which twice as many threads are tried again. Each trial that fails doubles them."""


class ThreadLimit:
    """How many threads a call may use at the moment.

    Python threads that use it at once may miscount each other's calls, which only delays it.
    """

    def __init__(self) -> None:
        self._halvings = 0
        self._calls = 0  # of this window
        self._before = 0  # times the processor had been taken away when the window began
        self._left = 0  # calls until more threads are tried
        self._rest = FIRST_REST

    def threads(self, wanted: int) -> int:
        """Returns how many of the wanted threads the next call may use, at least 1."""
        if wanted == 1:
            return 1
        if self._left:
            self._left -= 1
            if not self._left:
                self._halvings -= 1
                self._left = FIRST_REST if self._halvings else 0
                self._begin()
        count = max(1, wanted >> self._halvings)
        if count > 1:
            self._count()
        return count

    def _begin(self) -> None:
        self._calls, self._before = 0, times_taken_away()

    def _count(self) -> None:
        """Counts a call on several threads, and judges the window that it ends."""
        if self._calls == 0:
            self._begin()
        self._calls += 1
        if self._calls <= WINDOW:
            return
        busy = times_taken_away() - self._before >= TAKEN
        self._calls = 0
        if busy:
            self._halvings += 1
            self._left = self._rest
            self._rest = min(2 * self._rest, LONGEST_REST)
        elif not self._halvings:
            self._rest = FIRST_REST


def times_taken_away() -> int:
    """Returns how often the system has taken a processor away from a thread of this process that
    wanted to go on."""
    import resource  # which only the systems have for which there is a native library

    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
