"""Numbers from the host to the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def to_device(values: Any, device: torch.device) -> Tensor:
    """Returns whole numbers, in lists, as an int64 tensor on the device.

    On a GPU the copy is queued behind what runs there, and the host goes on: from ordinary memory
    it would wait for all of that first.
    """
    found = torch.tensor(values, dtype=torch.long)
    if device.type != "cuda":
        return found.to(device)
    return found.pin_memory().to(device, non_blocking=True)
