"""Peak memory of a piece of work, and how fast memory can be read."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from outpace.core.transfer import synchronise

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


@dataclass
class Peak:
    """The most bytes held at once: of GPU memory where there is a GPU, else by the process."""

    bytes: int = 0


@contextmanager
def peak_of() -> Iterator[Peak]:
    """Measures the peak memory of what runs inside, without a thread that would disturb it.

    On Linux the kernel's record of the peak is reset first. Elsewhere it cannot be reset, and the
    peak is that of the whole process so far.
    """
    peak = Peak()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        with suppress(OSError):
            _CLEAR.write_text("5")  # documented in proc(5): resets VmHWM, nothing else
    yield peak
    peak.bytes = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _high_water()


def _high_water() -> int:
    with suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def read_bandwidth(device: torch.device, megabytes: int | None = None, repeats: int = 7) -> float:
    """Returns the bytes per second at which a matrix much larger than any cache is read.

    It is read by a product with a vector, as plain decoding reads weights, and by a sum; the
    fastest of all reads counts. megabytes: its size; unset: 512, and on a GPU 8192, where starting
    to read would be a part of the time of fewer.
    """
    if megabytes is None:
        megabytes = 8192 if device.type == "cuda" else 512
    columns = 4096
    rows = megabytes * 2**20 // (4 * columns)
    matrix = torch.ones(rows, columns, device=device)
    vector = torch.ones(columns, device=device)
    kernels: tuple[Callable[[], Tensor], ...] = (lambda: matrix @ vector, matrix.sum)
    best = float("inf")
    for _ in range(repeats):
        for kernel in kernels:
            synchronise(device)
            begin = perf_counter()
            kernel()
            synchronise(device)
            best = min(best, perf_counter() - begin)
    return matrix.nbytes / best
