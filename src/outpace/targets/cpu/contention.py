"""Fewer threads while other processes use the processors.

The threads of a pass wait for each other about five times per layer, and those of torch at the end
of each operation. Where another process has taken the processor of one of them, all wait for it: a
softmax that takes 60 microseconds on one thread can take five milliseconds on two. The system knows
how long threads have waited for a processor, and that is what is looked at.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from outpace.targets.cpu.threads import set_threads, wanted_threads

WINDOW = 0.2
"""Seconds after which the number of threads is looked at again."""

SHARE = 0.25
"""Threads are halved once they have waited for processors for this share of a window. Half of
the threads take up to twice as long; but all wait whenever one of them does."""

FIRST_REST = 0.5
LONGEST_REST = 60.0
"""Seconds after which twice as many threads are tried again. Each trial that fails doubles them."""

TASKS = Path("/proc/self/task")
"""Where Linux says how long each thread of this process has waited."""


class ThreadLimit:
    """A context in which torch, and with it outpace's own kernels, may use fewer threads.

    Outside of it the number of threads is the wanted one (`wanted_threads`).
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._wanted = 0  # threads, as asked for outside
        self._allowed = 0  # threads at the moment
        self._begin = self._end = 0.0  # of the window
        self._waited = 0.0  # seconds, when the window began
        self._retry = 0.0  # when more threads are tried
        self._rest = FIRST_REST

    def __enter__(self) -> None:
        wanted = wanted_threads()
        if wanted != self._wanted:
            self._wanted = self._allowed = wanted
            self._open_window(self._clock())
        elif wanted > 1:
            self._look()
        set_threads(self._allowed)

    def __exit__(self, *exception: object) -> None:
        set_threads(self._wanted)

    def _open_window(self, now: float) -> None:
        self._begin, self._end = now, now + WINDOW
        if self._allowed > 1:  # one thread waits for no other
            self._waited = seconds_waited()

    def _look(self) -> None:
        """Changes the number of threads at the end of a window, if there is reason to."""
        now = self._clock()
        if now < self._end:
            return
        several = self._allowed > 1
        if several and seconds_waited() - self._waited > SHARE * (now - self._begin):
            self._allowed //= 2
            self._retry = now + self._rest
            self._rest = min(2 * self._rest, LONGEST_REST)
        elif self._allowed == self._wanted:
            self._rest = FIRST_REST
        elif now >= self._retry:
            self._allowed = min(2 * self._allowed, self._wanted)
        self._open_window(now)


def seconds_waited() -> float:
    """Returns how long the threads of this process together have been ready to run without a
    processor to run on; 0 where the system does not say."""
    nanoseconds = 0
    try:
        for thread in os.listdir(TASKS):
            try:
                nanoseconds += int((TASKS / thread / "schedstat").read_text().split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has just ended, or the system says nothing about threads
    except OSError:
        return 0.0
    return nanoseconds / 1e9
