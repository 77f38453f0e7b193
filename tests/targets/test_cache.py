"""The slot cache: rows that come, grow, end and are copied leave what others have cached alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from devices import on_device
from outpace.targets.hf.cache import SlotCache
from outpace.targets.hf.runner import Runner
from outpace.targets.hf.slot_ranges import SLOT_GRANULARITY, PassSlots

from .families import CONTEXT, target
from .generating import decoder, greedy, ids

HEADS, SIZE, LAYERS = 2, 4, 2


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def place(cache: SlotCache, starts: Sequence[int], columns: int, first: int = 0) -> None:
    """Begins a pass that feeds n columns after each row's start."""
    cache.reserve(first, [start + columns for start in starts])
    cache.slots = PassSlots(
        cache.placement(first, len(starts)),
        starts=torch.tensor(starts),
        uniform_start=starts[0] if len(set(starts)) == 1 else None,
        columns=columns,
        view=max(starts) + columns,
    )


def filled(needed: Sequence[int], most: int = 8) -> SlotCache:
    """A cache of rows that need n slots each; every number in it is another one."""
    cache = SlotCache(most)
    cache.admit(len(needed))
    cache.reserve(0, needed)
    place(cache, [0] * len(needed), 1)
    for layer in range(LAYERS):
        cache.update(*torch.zeros(2, len(needed), HEADS, 1, SIZE).double(), layer)
    for index, buffer in enumerate(cache.buffers):
        buffer.copy_(torch.arange(buffer.numel()).view_as(buffer) + index * buffer.numel() + 1)
    return cache


def contents(cache: SlotCache, row: int) -> list[torch.Tensor]:
    return [slots.clone() for slots in cache.row(row)]


def same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# -- extents ---------------------------------------------------------------------------------------


def test_a_finished_row_moves_nothing() -> None:
    cache = filled([10, 10, 10])
    before = [(buffer.data_ptr(), buffer.clone()) for buffer in cache.buffers]
    kept = [contents(cache, row) for row in (0, 2)]
    cache.retain([0, 2])
    place(cache, [3, 5], 2)
    for (pointer, old), buffer in zip(before, cache.buffers, strict=True):
        assert buffer.data_ptr() == pointer
        assert torch.equal(buffer, old)
    assert [contents(cache, row)[0].tolist() for row in (0, 1)] == [row[0].tolist() for row in kept]


def test_a_row_that_grows_is_the_only_one_copied() -> None:
    cache = filled([10, 10, 10, 10])
    cache.retain([2, 3])  # 512 slots are free in front of them
    pointers = [buffer.data_ptr() for buffer in cache.buffers]
    grows, stays = contents(cache, 0), contents(cache, 1)
    place_of_other = [slots.data_ptr() for slots in cache.row(1)]
    cache.reserve(0, [SLOT_GRANULARITY + 1, 10])
    assert [buffer.data_ptr() for buffer in cache.buffers] == pointers
    assert [slots.data_ptr() for slots in cache.row(1)] == place_of_other
    assert same(contents(cache, 1), stays)
    for old, new in zip(grows, cache.row(0), strict=True):
        assert new.shape[1] == 2 * SLOT_GRANULARITY, "twice as large"
        assert torch.equal(new[:, :SLOT_GRANULARITY], old), "to the last slot"
        assert not new[:, SLOT_GRANULARITY:].any(), "nothing of whoever was there before"


def test_larger_buffers_keep_the_content_of_all_rows() -> None:
    cache = filled([10, 10])
    before = [contents(cache, row) for row in range(2)]
    generation = cache.generation
    cache.reserve(0, [SLOT_GRANULARITY, SLOT_GRANULARITY])
    assert cache.generation == generation, "what fits already needs no other buffers"
    cache.reserve(0, [10, SLOT_GRANULARITY + 1])
    assert cache.generation == generation + 1
    for row in range(2):
        for old, new in zip(before[row], cache.row(row), strict=True):
            assert torch.equal(new[:, :SLOT_GRANULARITY], old)
            assert not new[:, SLOT_GRANULARITY:].any()


def test_one_long_row_takes_the_memory_of_one_long_row() -> None:
    cache = filled([2100, *[5] * 7])
    slot = 2 * LAYERS * HEADS * SIZE * 8
    assert cache.nbytes == (2304 + 7 * SLOT_GRANULARITY + cache.spare) * slot
    assert cache.longest == 2304


def test_memory_falls_when_a_long_row_ends() -> None:
    cache = filled([12000, *[5] * 7])
    short = [contents(cache, row) for row in range(1, 8)]
    held = cache.nbytes
    cache.retain(range(1, 8))
    assert cache.nbytes == held, "nothing is done while a round is under way"
    cache.reserve(0, [6] * 7)
    assert cache.capacity == 7 * SLOT_GRANULARITY + cache.spare
    assert cache.nbytes * 6 < held
    assert all(same(contents(cache, row), old) for row, old in enumerate(short))


def test_memory_falls_when_all_rows_have_ended_and_a_short_one_comes() -> None:
    cache = filled([5000], most=1)
    cache.retain([])
    cache.admit(1)
    cache.reserve(0, [5])
    assert cache.capacity == SLOT_GRANULARITY
    assert not any(slots.any() for slots in cache.row(0))


def test_few_short_rows_do_not_exchange_the_buffers_of_many() -> None:
    cache = filled([10] * 8)
    generation = cache.generation
    cache.retain([3])
    cache.reserve(0, [10])
    assert cache.generation == generation, "recorded passes would have to be recorded anew"


def test_rows_that_come_together_lie_at_equal_distances() -> None:
    cache = filled([10, 300, 10])
    placement = cache.placement(0, 3)
    assert placement.spacing is not None
    assert placement.spacing.distance == 2 * SLOT_GRANULARITY, (
        "room that costs less than twice as much"
    )
    cache.admit(2)
    cache.reserve(3, [10, 10])
    added = cache.placement(3, 2)
    assert added.spacing is not None


def test_a_row_in_slots_that_held_nan_sees_none() -> None:
    cache = filled([10, 10, 10])
    for slots in cache.row(1):
        slots.fill_(float("nan"))
    cache.retain([0, 2])
    place(cache, [3, 5], 2)
    cache.admit(1)
    place(cache, [0], 3, first=2)
    assert not any(slots.any() for slots in cache.row(2))


def poisoned(cache: SlotCache, spared: int) -> None:
    """Fills all slots with NaN but those of one row."""
    spare = contents(cache, spared)
    for buffer in cache.buffers:
        buffer.fill_(float("nan"))
    for slots, old in zip(cache.row(spared), spare, strict=True):
        slots.copy_(old)


def test_a_short_row_never_looks_at_the_slots_of_another() -> None:
    cache = filled([2000, 10, 10])
    poisoned(cache, spared=1)
    place(cache, [1500, 4, 4], 2)
    keys, values = cache.update(*torch.ones(2, 3, HEADS, 2, SIZE).double(), 0)
    assert keys.shape == values.shape == (3, HEADS, 1502, SIZE)
    assert keys[0].isnan().any()
    assert not keys[1].isnan().any()
    assert not values[1].isnan().any()


def test_rows_that_touch_are_not_looked_at_beyond_their_ends() -> None:
    cache = filled([10] * 5)
    cache.retain([0, 4])
    cache.reserve(1, [300])
    assert cache.placement(0, 2).spacing is not None, "by chance, at the distance of one grain"
    poisoned(cache, spared=0)
    place(cache, [4, 300], 2)
    keys, _ = cache.update(*torch.ones(2, 2, HEADS, 2, SIZE).double(), 0)
    assert not keys[0].isnan().any()


def test_bounds_go_to_the_device_when_extents_have_changed_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, sent = filled([3, 40]), []

    def to_device(numbers: list[tuple[int, int]], device: torch.device) -> torch.Tensor:
        sent.append(numbers)
        return torch.tensor(numbers)

    monkeypatch.setattr("outpace.targets.hf.cache.to_device", to_device)
    cache.retain([1])
    for _ in range(3):
        lies = cache.padded_placement(2)
    assert len(sent) == 1
    cache.reserve(0, [400])
    cache.padded_placement(2)
    row, missing = sent[-1][:2]
    assert len(sent) == 2
    assert (lies.firsts[0], lies.lasts[0]) == row  # the device looks up how rows lie now
    assert missing[0] == cache.capacity - cache.spare


def test_more_rows_than_the_cache_holds_are_our_own_mistake() -> None:
    runner = Runner(target("llama"), rows=2, max_length=CONTEXT)
    with pytest.raises(AssertionError, match="3 rows in a cache of 2"):
        runner.admit(3)


# -- writing and reading ---------------------------------------------------------------------------


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("starts", [(4, 7, 4), (6, 6, 6)])
def test_rows_are_written_where_each_ends(starts: tuple[int, ...], uneven: bool) -> None:
    cache = filled([10] * 4)
    cache.retain([0, 1, 3] if uneven else [0, 1, 2])
    place(cache, starts, 2)
    assert (cache.slots.spacing is None) == uneven
    before = [buffer.clone() for buffer in cache.buffers]
    rows = [contents(cache, row)[0] for row in range(3)]
    new = torch.rand(3, HEADS, 2, SIZE).double()
    keys, values = cache.update(new, -new, 0)
    assert keys.shape == values.shape == (3, HEADS, max(starts) + 2, SIZE)
    shares = keys.untyped_storage().data_ptr() == cache.buffers[0].untyped_storage().data_ptr()
    assert shares != uneven, "rows at equal distances are not copied"
    for row, start in enumerate(starts):
        assert torch.equal(keys[row, :, start : start + 2], new[row])
        assert torch.equal(values[row, :, start : start + 2], -new[row])
        assert torch.equal(cache.row(row)[0][:, start : start + 2], new[row])
        assert torch.equal(keys[row, :, :start], rows[row][:, :start])
    changed = [(buffer != old).sum() for buffer, old in zip(cache.buffers, before, strict=True)]
    assert changed == [3 * HEADS * 2 * SIZE] * 2 + [0, 0], "nothing else may change"


def test_one_row_is_read_in_place_wherever_it_lies() -> None:
    cache = filled([10, 300, 2000])
    place(cache, [100], 3, first=1)
    keys, _ = cache.update(*torch.ones(2, 1, HEADS, 3, SIZE).double(), 0)
    assert keys.data_ptr() == cache.row(1)[0].data_ptr()
    assert torch.equal(keys[0], cache.row(1)[0][:, :103])


def test_a_path_moves_to_the_front_though_source_and_target_overlap() -> None:
    cache = filled([10, 10, 10])
    before = [contents(cache, row) for row in range(3)]
    cache.move_path(row=1, start=3, nodes=[2, 3, 5])
    for old, new in zip(before[1], cache.row(1), strict=True):
        assert torch.equal(new[:, 4:7], old[:, [5, 6, 8]])
        assert torch.equal(new[:, :4], old[:, :4])
        assert torch.equal(new[:, 7:], old[:, 7:])
    assert same(contents(cache, 0), before[0])
    assert same(contents(cache, 2), before[2])


def test_a_fork_has_slots_of_its_own() -> None:
    cache = filled([300, 10])
    before = [contents(cache, row) for row in range(2)]
    assert cache.fork(0, length=270) == 2
    for old, source, new in zip(before[0], cache.row(0), cache.row(2), strict=True):
        assert torch.equal(new[:, :270], old[:, :270])
        new.fill_(0.5)
        assert torch.equal(source, old)
    assert same(contents(cache, 1), before[1])


# -- models ----------------------------------------------------------------------------------------


def after(runner: Runner, texts: Sequence[Sequence[int]]) -> float:
    """Feeds the last token of each row's text; returns how far its logits are from those of a plain
    forward of that text."""
    logits = runner.forward(on_device([[text[-1]] for text in texts]), keep=1).logits
    plain = [runner.model(input_ids=on_device([list(text)])).logits[0, -1] for text in texts]
    return float((logits[:, -1] - torch.stack(plain)).abs().max())


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
def test_rows_that_stay_continue_as_if_the_others_had_never_been(family: str) -> None:
    texts = [[*range(1, 10)], [10, 11], [12, 13, 14, 15], [16, 17, 18]]
    runner = Runner(target(family), rows=4, max_length=CONTEXT)
    runner.admit(4)
    runner.prefill(0, [text[:-1] for text in texts])
    runner.retain([0, 1, 3])
    assert runner.lengths == [8, 1, 2]
    texts.pop(2)
    assert runner.cache.placement(0, 3).spacing is None
    assert after(runner, texts) < 1e-6
    runner.retain([0, 2])
    texts.pop(1)
    assert runner.cache.placement(0, 2).spacing is not None
    assert after(runner, texts) < 1e-6


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_prefilling_new_rows_leaves_the_rows_in_use_alone(family: str) -> None:
    runner = Runner(target(family), rows=3, max_length=CONTEXT)
    runner.admit(1)
    runner.prefill(0, [[*range(1, 9)]])
    before = contents(runner.cache, 0)
    runner.admit(2)
    runner.prefill(1, [[9, 8, 7], list(range(20, 32))])
    assert same(contents(runner.cache, 0), before)
    assert runner.lengths == [8, 3, 12]
    assert after(runner, [[*range(1, 9), 40], [9, 8, 7, 41], [*range(20, 32), 42]]) < 1e-6


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_fork_continues_on_its_own(family: str) -> None:
    runner = Runner(target(family), rows=3, max_length=CONTEXT)
    runner.admit(1)
    runner.prefill(0, [[*range(1, 9)]])
    assert runner.fork(0, 8) == 1
    assert runner.fork(0, 5) == 2
    assert runner.lengths == [8, 8, 5]
    texts = [[*range(1, 9), 20], [*range(1, 9), 30], [*range(1, 6), 40]]
    for token in (9, 17):
        assert after(runner, texts) < 1e-6
        runner.advance([1, 1, 1])
        texts = [[*text, token + row] for row, text in enumerate(texts)]


def test_hundreds_of_requests_leave_nothing_behind() -> None:
    llm = decoder("llama", "draft_model", 3, rows=8)
    first = llm.generate([[1, 2, 3]] * 8, greedy(4))
    held = (llm.engine.target.cache_bytes, llm.engine.drafter.nbytes)
    for _ in range(24):
        llm.generate([[4, 5], [6]] * 4, greedy(2))
    assert (llm.engine.target.cache_bytes, llm.engine.drafter.nbytes) == held
    assert llm.engine.target.lengths == []
    assert not llm.engine.has_unfinished_requests
    assert ids(llm.generate([[1, 2, 3]] * 8, greedy(4))) == ids(first)
