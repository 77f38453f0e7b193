"""Passes in few shapes that come again, so that they can be compiled or recorded.

A pass sees one of a few numbers of slots and, where that is wanted, is padded to one of a few
widths. Then little about it but the numbers in its inputs changes from round to round, and it can
be run again without Python. How that is done is for `engine.capture` to say.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torch import Tensor

from outpace.errors import ConfigError
from outpace.targets.hf.slots.placement import Placement

LOGGER = logging.getLogger("outpace")

WIDEST = 64
"""Columns of a pass of fixed shape, at most; wider passes are run as they come."""

PENDING = 2
"""Committed tokens that such a pass feeds at most: more are a prompt, or a model that catches up,
and come in any number."""

SLOTS = 256
"""A pass of fixed shape sees slots in multiples of this; one that is recorded, in this times a
power of two."""

Forward = Callable[..., Any]
Outputs = tuple[Tensor, ...]
Step = Callable[..., Outputs]
"""``step(*inputs)``: computed on the device alone, from its inputs and from buffers that stay where
they are."""


class CannotRecord(Exception):
    """A step does what a recording cannot hold, such as asking the host."""


class StepRunner(ABC):
    """Runs steps whose shapes come again and again."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Spent so far on steps that were not ready: on compiling and recording them, and on
        running them meanwhile."""
        self._ready: set[Hashable] = set()

    def run(self, key: Hashable, step: Step, inputs: Sequence[Tensor]) -> Outputs:
        """Returns ``step(*inputs)``, which is good until the next step.

        key: all that shapes the step, so that equal keys stand for the same step.
        """
        if key in self._ready:
            return self._run(key, step, inputs)
        begin = perf_counter()
        outputs = self._run_unready(key, step, inputs)
        self.seconds += perf_counter() - begin
        return outputs

    @abstractmethod
    def _run(self, key: Hashable, step: Step, inputs: Sequence[Tensor]) -> Outputs:
        """Runs a step that is ready."""

    def _run_unready(self, key: Hashable, step: Step, inputs: Sequence[Tensor]) -> Outputs:
        """Runs a step that is not ready, and makes it so, at once or when it comes again."""
        self._ready.add(key)
        return self._run(key, step, inputs)

    def forget(self) -> None:
        """Drops all that points into buffers: they have moved."""


@dataclass(frozen=True, eq=False)
class FixedShape:
    """The shape of a pass, with its padding, and what the pass sees of the cache."""

    rows: int
    columns: int
    slots: int
    """How many slots of each row it sees."""
    placement: Placement
    """Where the rows lie."""

    @property
    def key(self) -> Hashable:
        """All of it that shapes a step. Where evenly spaced rows lie cannot be told a recorded step
        later; where others lie it looks up on the device, and any such placement will do."""
        return self.rows, self.columns, self.slots, self.placement.spaced(self.slots)


@dataclass(frozen=True, eq=False)
class FixedShapes:
    """How one model's passes of fixed shapes are run.

    forward: stands for the model in them. steps: runs them. pads: whether few shapes are wanted:
    rows, columns and slots in powers of two.
    required: whether a user has asked for it, so that what has no such passes is refused.
    """

    forward: Forward
    steps: StepRunner
    pads: bool
    required: bool = True

    def left_out(self, reason: str) -> None:
        """Says that a model's passes are played as they come after all, and why; raises
        ``ConfigError`` where they are required."""
        if self.required:
            raise ConfigError(f"{reason}: leave compile out.")
        LOGGER.warning("outpace: %s; each of them takes somewhat longer.", reason)

    def width(self, columns: int) -> int | None:
        """Returns the columns to pad a pass to, None if it is too wide for a fixed shape."""
        if columns > WIDEST:
            return None
        return power_of_two(columns) if self.pads else columns

    def rows(self, count: int, most: int) -> int:
        """Returns the rows to pad a pass to. most: as many as there can be."""
        return min(power_of_two(count), most) if self.pads else count

    def slots(self, needed: int, longest: int) -> int:
        """Returns how many slots of each row such a pass sees. longest: those of the largest
        row."""
        seen = -(-needed // SLOTS)
        if self.pads:  # few numbers, since each is recorded anew; what is masked costs little
            seen = power_of_two(seen)
        return min(seen * SLOTS, longest)


def power_of_two(count: int) -> int:
    """Returns the smallest power of two that is not less.

    >>> [power_of_two(count) for count in (1, 2, 3, 8, 9)]
    [1, 2, 4, 8, 16]
    """
    return 1 << (count - 1).bit_length()
