"""The number of threads of passes on a CPU: fewer while other processes use the processors."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

import torch

from outpace.core.values import integer
from outpace.errors import ConfigError

LOGGER = logging.getLogger("outpace")

MAX_THREADS_PER_CPU = 4
"""Threads for each processor, at most: ten thousand of them take the machine's memory."""

GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
"""Where Linux says what a container may use of the machine."""


_asked = 0
"""Threads that passes of this process shall have; 0: nobody has said so yet."""
_divided = 0, 0
"""Threads before they were shared out among processes, and this one's share (`share_threads`)."""
_own = threading.local()
"""``count``: the number of torch's threads that was last set here, of each thread of Python."""


def wanted_threads() -> int:
    """Returns how many threads passes shall have: as `use_threads` has set it or, since then,
    ``torch.set_num_threads`` in this thread of Python.

    It need not be torch's present number. While a step has fewer threads (`ThreadLimit`), a thread
    of Python that begins meanwhile takes that number over.
    """
    global _asked
    present = torch.get_num_threads()
    if not _asked or present != getattr(_own, "count", present):
        _asked = _own.count = present
    return _asked


def set_threads(count: int) -> None:
    """Sets the number of torch's threads for now, without changing what is wanted."""
    if count != torch.get_num_threads():
        torch.set_num_threads(count)
    _own.count = count


def use_threads(wanted: int | None) -> int:
    """Sets the number of torch's threads in this process, and returns it.

    None leaves the number as it is, but takes a share back (`share_threads`), and has no more than
    this process has processors for (`processors`): threads that wait for each other lose much time
    where one of them has none. Raises ``ConfigError`` for anything but a whole number from 1 to
    `MAX_THREADS_PER_CPU` for each processor.
    """
    global _asked, _divided
    if wanted is None:
        present = wanted_threads()
        present = _divided[0] if present == _divided[1] else present
        count = min(present, processors())
        if count < present:
            LOGGER.info("%d threads, because this process may use no more processors", count)
    else:
        count = integer("threads", wanted, 1, error=ConfigError)
        most = MAX_THREADS_PER_CPU * processors()
        if count > most:
            raise ConfigError(
                f"threads must be at most {most}, not {wanted}: this process may use "
                f"{processors()} processors, and more threads only wait for each other."
            )
    set_threads(count)
    _asked, _divided = count, (0, 0)
    return count


def share_threads(processes: int) -> int:
    """Sets this process's share of the threads that it would have alone (`use_threads` of None),
    for as many processes on this machine, and returns it: at least 1."""
    global _divided
    alone = use_threads(None)
    share = use_threads(max(1, alone // processes))
    _divided = alone, share
    return share


def processors() -> int:
    """Returns how many processors this process may use at once, at least 1.

    That is as many as it is bound to, and no more than the quota of its container, rounded down.
    """
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, int(min([bound or 1, *_quotas()])))


def _quotas() -> Iterator[float]:
    """Yields how many processors each control group of this process may use, if it is limited."""
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = GROUPS / "cpu" if controllers else GROUPS
        # A limit on a group holds for the groups in it. In a container the paths of the machine may
        # be out of sight, and the root is the container's own group.
        group = root / path.strip("/")
        for each in (group, *group.parents):
            if each == root or root in each.parents:
                quota = _quota(each)
                if quota is not None:
                    yield quota


def _quota(group: Path) -> float | None:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text().strip()
        limited = quota != "max" and int(quota) > 0
        return int(quota) / int(period) if limited else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


# -- fewer threads while other processes use the processors ----------------------------------------


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
