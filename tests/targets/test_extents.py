"""The allocator of slots: extents never overlap, and whatever is freed can be had again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.targets.hf.extents import (
    GRAIN,
    NO_SLOTS,
    Extent,
    ExtentAllocator,
    evened,
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


def longest_gap(taken: Sequence[Extent]) -> int:
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
    allocator, taken = ExtentAllocator(TOTAL), list[Extent]()
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
            allocator.give_back(taken.pop(what % len(taken)))
        used = [slot for extent in taken for slot in range(extent.first, extent.end)]
        assert len(used) == len(set(used)), "two extents share a slot"
        assert all(0 <= slot < TOTAL for slot in used)
        assert allocator.free == TOTAL - len(used)
    for extent in taken:
        allocator.give_back(extent)
    assert allocator.take([TOTAL]) == [Extent(0, TOTAL)], "what was freed is one gap again"


def test_the_first_gap_that_is_large_enough_is_taken() -> None:
    allocator = ExtentAllocator(10)
    a, b, c, _ = allocator.take([2, 3, 3, 2]) or []
    allocator.give_back(a)
    allocator.give_back(c)
    assert allocator.take([3]) == [c]
    assert allocator.take([1]) == [Extent(0, 1)]
    allocator.give_back(b)
    assert allocator.take([5]) is None, "what is free lies in one gap, of four slots"
    assert allocator.take([4]) == [Extent(1, 4)]


def test_giving_back_twice_is_our_own_mistake() -> None:
    allocator = ExtentAllocator(10)
    first, second = allocator.take([4, 6]) or []
    allocator.give_back(first)
    with pytest.raises(AssertionError, match="free already"):
        allocator.give_back(first)
    with pytest.raises(AssertionError, match="free already"):
        allocator.give_back(Extent(2, 5))
    allocator.give_back(second)
    allocator.give_back(NO_SLOTS)
    assert allocator.free == 10


def test_sizes_are_multiples_of_the_grain_and_at_least_double() -> None:
    assert [rounded(n) for n in (1, GRAIN, GRAIN + 1)] == [GRAIN, GRAIN, 2 * GRAIN]
    assert grown(GRAIN, GRAIN) == GRAIN
    assert grown(4 * GRAIN, 4 * GRAIN + 1) == 8 * GRAIN
    assert grown(GRAIN, 5 * GRAIN - 1) == 5 * GRAIN


def test_rows_are_evened_where_that_costs_at_most_twice_the_slots() -> None:
    assert evened([]) == []
    assert evened([256, 512, 256]) == [512, 512, 512]
    assert evened([2304, 256, 256]) == [2304, 256, 256]
