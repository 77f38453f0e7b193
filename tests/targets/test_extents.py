"""The allocator of slots: extents never overlap, and whatever is freed can be had again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.targets.hf.slot_ranges import (
    NO_SLOTS,
    SLOT_GRANULARITY,
    SlotAllocator,
    SlotRange,
    equalize,
    grown,
    rounded,
)

TOTAL = 12

steps = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.lists(st.integers(0, 5), min_size=1, max_size=3)),
        st.tuples(st.just("give back"), st.integers(0, 100)),
    ),
    max_size=40,
)


def longest_gap(taken: Sequence[SlotRange]) -> int:
    """Returns the longest run of slots that no extent covers, counted slot by slot."""
    used = {slot for extent in taken for slot in range(extent.first, extent.end)}
    longest = run = 0
    for slot in range(TOTAL):
        run = 0 if slot in used else run + 1
        longest = max(longest, run)
    return longest


@given(steps)
def test_extents_never_overlap_and_gaps_are_joined(
    steps: Sequence[tuple[str, list[int] | int]],
) -> None:
    allocator, taken = SlotAllocator(TOTAL), list[SlotRange]()
    for name, what in steps:
        if isinstance(what, list):
            fits = sum(what) <= longest_gap(taken)
            new = allocator.take(what)
            assert (new is not None) == fits, "a gap that is large enough is found, joined or not"
            if new is not None:
                assert [extent.size for extent in new] == what
                here = [extent for extent in new if extent.size]
                assert all(a.end == b.first for a, b in itertools.pairwise(here))
                taken += here
        elif taken:
            assert name == "give back"
            allocator.release(taken.pop(what % len(taken)))
        used = [slot for extent in taken for slot in range(extent.first, extent.end)]
        assert len(used) == len(set(used)), "two extents share a slot"
        assert all(0 <= slot < TOTAL for slot in used)
        assert allocator.free == TOTAL - len(used)
    for extent in taken:
        allocator.release(extent)
    assert allocator.take([TOTAL]) == [SlotRange(0, TOTAL)], "what was freed is one gap again"


def test_the_first_gap_that_is_large_enough_is_taken() -> None:
    allocator = SlotAllocator(10)
    a, b, c, _ = allocator.take([2, 3, 3, 2]) or []
    allocator.release(a)
    allocator.release(c)
    assert allocator.take([3]) == [c]
    assert allocator.take([1]) == [SlotRange(0, 1)]
    allocator.release(b)
    assert allocator.take([5]) is None, "what is free lies in one gap, of four slots"
    assert allocator.take([4]) == [SlotRange(1, 4)]


def test_giving_back_twice_is_our_own_mistake() -> None:
    allocator = SlotAllocator(10)
    first, second = allocator.take([4, 6]) or []
    allocator.release(first)
    with pytest.raises(AssertionError, match="free already"):
        allocator.release(first)
    with pytest.raises(AssertionError, match="free already"):
        allocator.release(SlotRange(2, 5))
    allocator.release(second)
    allocator.release(NO_SLOTS)
    assert allocator.free == 10


def test_sizes_are_multiples_of_the_grain_and_at_least_double() -> None:
    assert [rounded(n) for n in (1, SLOT_GRANULARITY, SLOT_GRANULARITY + 1)] == [
        SLOT_GRANULARITY,
        SLOT_GRANULARITY,
        2 * SLOT_GRANULARITY,
    ]
    assert grown(SLOT_GRANULARITY, SLOT_GRANULARITY) == SLOT_GRANULARITY
    assert grown(4 * SLOT_GRANULARITY, 4 * SLOT_GRANULARITY + 1) == 8 * SLOT_GRANULARITY
    assert grown(SLOT_GRANULARITY, 5 * SLOT_GRANULARITY - 1) == 5 * SLOT_GRANULARITY


def test_rows_are_evened_where_that_costs_at_most_twice_the_slots() -> None:
    assert equalize([]) == []
    assert equalize([256, 512, 256]) == [512, 512, 512]
    assert equalize([2304, 256, 256]) == [2304, 256, 256]
