"""Which slots of the cache's buffers are taken: extents, and an allocator that lends them out.

An extent is a run of neighbouring slots that belongs to one row. The allocator knows the free ones
as a list of gaps in ascending order. It takes from the first gap that is large enough, and joins
gaps that come to touch, so that long extents can be had again after short ones were freed.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

GRAIN = 256
"""All extents are multiples of this many slots, so that sizes take few different values."""


@dataclass(frozen=True)
class Extent:
    """``size`` slots from slot ``first`` on."""

    first: int
    size: int

    @property
    def end(self) -> int:
        """The slot behind the last one."""
        return self.first + self.size


NO_SLOTS = Extent(0, 0)
"""What a row has before anything is reserved for it."""


class ExtentAllocator:
    """Lends out extents of ``total`` slots."""

    def __init__(self, total: int) -> None:
        self._gaps = [Extent(0, total)] if total else []  # ascending, and no two touch

    @property
    def free(self) -> int:
        """The slots that nobody has, in all gaps together."""
        return sum(gap.size for gap in self._gaps)

    def take(self, sizes: Sequence[int]) -> list[Extent] | None:
        """Returns neighbouring extents of these sizes, or None where no gap holds them all."""
        wanted = sum(sizes)
        if not wanted:
            return [NO_SLOTS] * len(sizes)
        for index, gap in enumerate(self._gaps):
            if gap.size >= wanted:
                rest = Extent(gap.first + wanted, gap.size - wanted)
                self._gaps[index : index + 1] = [rest] if rest.size else []
                firsts = accumulate(sizes, initial=gap.first)
                return [
                    Extent(first, size) if size else NO_SLOTS
                    for first, size in zip(firsts, sizes, strict=False)
                ]
        return None

    def give_back(self, extent: Extent) -> None:
        """Frees an extent that was taken."""
        if not extent.size:
            return
        index = bisect.bisect(self._gaps, extent.first, key=lambda gap: gap.first)
        before, after = self._gaps[:index], self._gaps[index:]
        if (before and before[-1].end > extent.first) or (after and after[0].first < extent.end):
            raise AssertionError(f"{extent} is given back, but part of it is free already")
        if before and before[-1].end == extent.first:
            extent = Extent(before[-1].first, before.pop().size + extent.size)
        if after and after[0].first == extent.end:
            extent = Extent(extent.first, extent.size + after.pop(0).size)
        self._gaps = [*before, extent, *after]


def rounded(slots: int) -> int:
    """Returns the size of the smallest extent that holds n slots."""
    return -(-slots // GRAIN) * GRAIN


def grown(size: int, needed: int) -> int:
    """Returns the size of an extent that replaces one of ``size`` slots: at least twice as large,
    so that a row that grows token by token is rarely copied."""
    return size if needed <= size else max(rounded(needed), 2 * size)


def evened(sizes: Sequence[int]) -> list[int]:
    """Returns all sizes made equal to the largest, where that at most doubles their sum; else the
    sizes as they are.

    Attention reads rows at equal distances in place, and copies others together for each pass: that
    is worth some memory, but not one long row's size for every short row.
    """
    largest = max(sizes, default=0)
    even = [largest] * len(sizes)
    return even if sum(even) <= 2 * sum(sizes) else list(sizes)
