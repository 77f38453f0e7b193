"""The highest of many scores, and where it is."""

from __future__ import annotations

import torch
from torch import Tensor

PART = 256
"""Scores of a part. The place of the highest is looked for only in the part that has it."""
MANY = 1 << 16
"""Scores of a node from which on looking at parts first is faster."""


def highest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the highest of the scores ``[..., V]`` and the first place of it, ``[...]`` both, as
    ``scores.max(-1)`` does; NaN is higher than all numbers.

    A processor finds the highest of a row of numbers about four times faster than the place of it.
    So the highest of each part is found first, and the place only within the part that has it.

    >>> values, places = highest(torch.tensor([[0.0, 2.0, 1.0, 2.0]]))
    >>> values.tolist(), places.tolist()
    ([2.0], [1])
    """
    count = scores.shape[-1]
    if scores.device.type != "cpu" or count < MANY:
        found = scores.max(-1)
        return found.values, found.indices
    whole = count - count % PART
    parts = scores[..., :whole].reshape(*scores.shape[:-1], whole // PART, PART).amax(-1)
    if whole < count:
        parts = torch.cat([parts, scores[..., whole:].amax(-1, keepdim=True)], -1)
    best = parts.max(-1)
    columns = best.indices[..., None] * PART + torch.arange(PART)
    inside = scores.gather(-1, columns.clamp_max(count - 1)).max(-1)
    return best.values, best.indices * PART + inside.indices
