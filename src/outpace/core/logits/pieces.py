"""Work over large vocabularies in pieces, so that what is held in between stays small."""

from __future__ import annotations

from collections.abc import Iterator

import torch

LARGEST = 1 << 19
"""Numbers of an intermediate result on a CPU, at most, unless a single row of it is longer.

Large results cost twice there: the operating system hands out their memory anew each time, and they
no longer fit into a processor's cache.
"""

LARGEST_ON_GPU = 1 << 25
"""The same on a GPU, where each piece costs the time to start its work: a quarter of a GB of
float64."""


def largest(device: torch.device) -> int:
    """Returns the most numbers that an intermediate result has on a device."""
    return LARGEST if device.type == "cpu" else LARGEST_ON_GPU


def pieces(count: int, width: int, device: torch.device) -> Iterator[slice]:
    """Yields slices that together cover ``range(count)``, each of at most `largest` numbers.

    width: how many numbers belong to each of the ``count`` items. A piece has at least one item.

    >>> list(pieces(3, LARGEST // 2, torch.device("cpu")))
    [slice(0, 2, None), slice(2, 3, None)]
    """
    size = max(1, largest(device) // max(1, width))
    for begin in range(0, count, size):
        yield slice(begin, min(begin + size, count))
