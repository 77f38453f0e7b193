"""Ranges of slots in the cache's buffers, their allocator, and the slots that a pass uses.

A range is a run of neighbouring slots that belongs to one row. The allocator knows the free ones
as a list of gaps in ascending order. It takes from the first gap that is large enough, and joins
gaps that come to touch, so that long ranges can be had again after short ones were freed.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

SLOT_GRANULARITY = 256
"""All ranges are multiples of this many slots, so that sizes take few different values."""


@dataclass(frozen=True)
class SlotRange:
    """``size`` slots from slot ``first`` on."""

    first: int
    size: int

    @property
    def end(self) -> int:
        """The slot after the last one."""
        return self.first + self.size


NO_SLOTS = SlotRange(0, 0)
"""What a row has before anything is reserved for it."""


class SlotAllocator:
    """Lends out ranges of ``total`` slots."""

    def __init__(self, total: int) -> None:
        self._gaps = [SlotRange(0, total)] if total else []  # ascending, and no two touch

    @property
    def free(self) -> int:
        """The slots that nobody has, in all gaps together."""
        return sum(gap.size for gap in self._gaps)

    def take(self, sizes: Sequence[int]) -> list[SlotRange] | None:
        """Returns neighbouring ranges of these sizes, or None where no gap holds them all."""
        wanted = sum(sizes)
        if not wanted:
            return [NO_SLOTS] * len(sizes)
        for index, gap in enumerate(self._gaps):
            if gap.size >= wanted:
                rest = SlotRange(gap.first + wanted, gap.size - wanted)
                self._gaps[index : index + 1] = [rest] if rest.size else []
                firsts = accumulate(sizes, initial=gap.first)
                return [
                    SlotRange(first, size) if size else NO_SLOTS
                    for first, size in zip(firsts, sizes, strict=False)
                ]
        return None

    def release(self, slot_range: SlotRange) -> None:
        """Frees a range that was taken."""
        if not slot_range.size:
            return
        index = bisect.bisect(self._gaps, slot_range.first, key=lambda gap: gap.first)
        before, after = self._gaps[:index], self._gaps[index:]
        if (before and before[-1].end > slot_range.first) or (
            after and after[0].first < slot_range.end
        ):
            raise AssertionError(f"{slot_range} is given back, but part of it is free already")
        if before and before[-1].end == slot_range.first:
            slot_range = SlotRange(before[-1].first, before.pop().size + slot_range.size)
        if after and after[0].first == slot_range.end:
            slot_range = SlotRange(slot_range.first, slot_range.size + after.pop(0).size)
        self._gaps = [*before, slot_range, *after]


def rounded(slots: int) -> int:
    """Returns the size of the smallest range that holds this many slots."""
    return -(-slots // SLOT_GRANULARITY) * SLOT_GRANULARITY


def grown(size: int, needed: int) -> int:
    """Returns the size of a range that replaces one of ``size`` slots: at least twice as large,
    so that a row that grows token by token is rarely copied."""
    return size if needed <= size else max(rounded(needed), 2 * size)


def equalize(sizes: Sequence[int]) -> list[int]:
    """Returns all sizes made equal to the largest, where that at most doubles their sum; else the
    sizes as they are.

    Attention reads rows at equal distances in place, and copies others together for each pass: that
    is worth some memory, but not one long row's size for every short row.
    """
    largest = max(sizes, default=0)
    even = [largest] * len(sizes)
    return even if sum(even) <= 2 * sum(sizes) else list(sizes)


# -- the slots of a pass ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Spacing:
    """Rows at equal distances: row a begins at slot ``first + a * distance``."""

    first: int
    distance: int


def spacing_of(ranges: Sequence[SlotRange]) -> Spacing | None:
    """Returns how ranges are spaced, None where their distances differ."""
    first = ranges[0].first
    distance = ranges[1].first - first if len(ranges) > 1 else 0
    even = all(slot_range.first == first + a * distance for a, slot_range in enumerate(ranges))
    return Spacing(first, distance) if even and distance >= 0 else None


@dataclass(frozen=True, eq=False)
class Placement:
    """The ranges of A consecutive rows."""

    firsts: Tensor  # [A] on the device: the first slot of each row
    lasts: Tensor  # [A] the last slot of each row
    spacing: Spacing | None
    shortest: int  # slots that every one of the rows has

    def of_rows(self, rows: slice) -> Placement:
        """Returns the ranges of consecutive ones of the rows."""
        spacing = self.spacing
        if spacing is not None:
            spacing = Spacing(spacing.first + rows.start * spacing.distance, spacing.distance)
        return Placement(self.firsts[rows], self.lasts[rows], spacing, self.shortest)

    def on(self, device: torch.device) -> Placement:
        """Returns the same ranges, with their slots on another device."""
        return replace(self, firsts=self.firsts.to(device), lasts=self.lasts.to(device))

    def spaced(self, view: int) -> Spacing | None:
        """Returns how the rows are spaced, if attention can see ``view`` slots of each of them in
        place: None where it would look at slots of other rows."""
        return self.spacing if view <= self.shortest else None


@dataclass(frozen=True, eq=False)
class PassSlots:
    """The slots of one pass: row a writes at ``starts[a], starts[a] + 1, ...`` of its own range,
    and sees the first ``view`` slots of that range, but for those that the mask hides."""

    placement: Placement
    starts: Tensor  # [A] on the device: how many slots of each row are committed
    uniform_start: int | None  # the start of every row, if they agree
    columns: int  # T
    view: int

    @property
    def rows(self) -> int:
        """A."""
        return self.starts.shape[0]

    def of_rows(self, rows: slice) -> PassSlots:
        """Returns the slots of consecutive ones of the rows."""
        placement, starts = self.placement.of_rows(rows), self.starts[rows]
        return replace(self, placement=placement, starts=starts)

    def on(self, device: torch.device) -> PassSlots:
        """Returns the same slots for a layer on a device, with their numbers there: made once for
        all layers on it."""
        if device == self.starts.device:
            return self
        if device not in self._elsewhere:
            placement, starts = self.placement.on(device), self.starts.to(device)
            self._elsewhere[device] = replace(self, placement=placement, starts=starts)
        return self._elsewhere[device]

    @cached_property
    def _elsewhere(self) -> dict[torch.device, PassSlots]:
        return {}

    @cached_property
    def spacing(self) -> Spacing | None:
        """How the rows are spaced, if attention can see them in place."""
        return self.placement.spaced(self.view)

    @cached_property
    def slot_mapping(self) -> Tensor:
        """The buffers' slots that the columns go to, ``[A * T]``: the same for all layers."""
        columns = torch.arange(self.columns, device=self.starts.device)
        return ((self.placement.firsts + self.starts)[:, None] + columns).flatten()

    @cached_property
    def seen(self) -> Tensor:
        """The buffers' slots that are copied together for attention, ``[A * view]``. Beyond the end
        of a row's range, where the mask hides all, stands its last slot: never another row's."""
        columns = torch.arange(self.view, device=self.starts.device)
        slots = self.placement.firsts[:, None] + columns
        return torch.minimum(slots, self.placement.lasts[:, None]).flatten()

    def precompute_indices(self) -> PassSlots:
        """Returns itself with all indices made, which a compiled forward cannot make."""
        _ = self.slot_mapping
        if self.spacing is None:
            _ = self.seen
        return self
