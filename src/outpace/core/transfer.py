"""Numbers from the host to the device, what they are padded to, and waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(values: Any, device: torch.device) -> Tensor:
    """Returns whole numbers, in lists, as an int64 tensor on the device.

    On a GPU the copy is queued after what runs there, and the host goes on: from ordinary memory
    it would wait for all of that first.
    """
    found = torch.tensor(values, dtype=torch.long)
    if device.type != "cuda":
        return found.to(device)
    return found.pin_memory().to(device, non_blocking=True)


def synchronise(device: torch.device) -> None:
    """Waits until the device has done its work, so that a clock can be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def padded(rows: Sequence[Sequence[int]], device: torch.device, width: int | None = None) -> Tensor:
    """Returns whole numbers, in rows of any lengths, as ``[B, width]`` on the device: 0 stands
    after the end of a row.

    width: None for the length of the longest row.

    >>> padded([[5, 6], [7]], torch.device("cpu")).tolist()
    [[5, 6], [7, 0]]
    """
    if width is None:
        width = max(map(len, rows), default=0)
    filled = [[*row, *[0] * (width - len(row))] for row in rows]
    return to_device(filled, device).view(len(rows), width)


def power_of_two(count: int) -> int:
    """Returns the smallest power of two that is not less: few shapes are padded to it.

    >>> [power_of_two(count) for count in (0, 1, 2, 3, 8, 9)]
    [1, 1, 2, 4, 8, 16]
    """
    return 1 << max(0, count - 1).bit_length()
