"""How many threads passes on a CPU compute with."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from outpace.core.values import shown
from outpace.errors import ConfigError

LOGGER = logging.getLogger("outpace")

MOST = 4
"""Threads for each processor, at most: ten thousand of them take the machine's memory."""

GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
"""Where Linux says what a container may use of the machine."""


_asked = 0
"""Threads that passes of this process shall have; 0: nobody has said so yet."""
_own = threading.local()
"""``count``: the number of torch's threads that was last set here, of each thread of Python."""


def wanted_threads() -> int:
    """Returns how many threads passes shall have: as `use_threads` has set it or, since then,
    ``torch.set_num_threads`` in this thread of Python.

    It need not be torch's present number. While a step has fewer threads (`contention`), a thread
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

    None leaves the number as it is, unless it is more than this process has processors for
    (`processors`): threads that wait for each other lose much time where one of them has none.
    Raises ``ConfigError`` for anything but a whole number from 1 to `MOST` for each processor.
    """
    global _asked
    if wanted is None:
        present = wanted_threads()
        count = min(present, processors())
        if count < present:
            LOGGER.info("%d threads, because this process may use no more processors", count)
    elif isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
        raise ConfigError(f"threads must be a whole number from 1 up, not {shown(wanted)}.")
    elif wanted > MOST * processors():
        raise ConfigError(
            f"threads must be at most {MOST * processors()}, not {wanted}: this process may use "
            f"{processors()} processors, and more threads only wait for each other."
        )
    else:
        count = wanted
    set_threads(count)
    _asked = count
    return count


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
