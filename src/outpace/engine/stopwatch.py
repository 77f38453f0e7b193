"""What the parts of a round take, on a CPU and on a GPU."""

from __future__ import annotations

import itertools
from time import perf_counter
from typing import Any

import torch

from outpace.core.stats import Seconds


class Stopwatch:
    """Times drafting, scoring and the rest of one round; it is running once it is made.

    A GPU is handed work and computes it later. There the device itself notes when it has come to
    the end of a part, so that nobody has to wait for it before the round's only transfer.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin = perf_counter()
        self._marks = [self._now()]

    def lap(self) -> None:
        """Ends drafting, or scoring."""
        self._marks.append(self._now())

    def stop(self) -> Seconds:
        """Returns the seconds of the parts, when the host has seen what was scored."""
        total = perf_counter() - self._begin
        draft, score = (self._between(*each) for each in itertools.pairwise(self._marks))
        return Seconds(draft, score, total - draft - score)

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _between(self, begin: Any, end: Any) -> float:
        if self._device.type != "cuda":
            return float(end - begin)
        return float(begin.elapsed_time(end)) / 1e3
