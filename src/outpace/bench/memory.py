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

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


@dataclass
class Peak:
    """The most bytes that were held at once: of the GPU where there is one, else of the process."""

    bytes: int = 0


@contextmanager
def peak_of() -> Iterator[Peak]:
    """Measures what runs inside, without a thread that would disturb it.

    On Linux the kernel's high-water mark is reset first; elsewhere it is the process's so far.
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


def read_bandwidth(device: torch.device, megabytes: int = 512, repeats: int = 7) -> float:
    """Returns bytes per second of the fastest of several reads of a large matrix.

    The kernel is the one that plain decoding lives on, a matrix times a vector, and a plain sum;
    the better counts. The matrix is much larger than any cache.
    """
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


def synchronise(device: torch.device) -> None:
    """Waits for the device, so that a clock means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
