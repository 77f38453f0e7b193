"""The slot cache: growing, moving and leaving rows changes nothing that is cached."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from outpace.targets.hf.cache import BUCKET, SlotCache, Writing
from outpace.targets.hf.runner import Runner

from .families import CONTEXT, target
from .generating import decoder, greedy, ids

ROWS, HEADS, SIZE = 3, 2, 4


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def filled(slots: int = 10) -> SlotCache:
    """A cache of two layers whose first slots hold numbers that are all different."""
    cache = SlotCache(ROWS)
    starts = torch.zeros(ROWS, dtype=torch.long)
    cache.writing = Writing(first=0, starts=starts, uniform_start=0, columns=slots, view=slots)
    for layer in range(2):
        count = ROWS * HEADS * slots * SIZE
        states = torch.arange(count).view(ROWS, HEADS, slots, SIZE).double() + layer * count + 1
        cache.update(states, -states, layer)
    return cache


def test_growing_keeps_the_content_and_clears_the_rest() -> None:
    cache = filled()
    before = [buffer.clone() for buffer in cache.buffers]
    cache.reserve(BUCKET)
    assert cache.capacity == BUCKET, "what fits already needs no room"
    cache.reserve(BUCKET + 1)
    assert cache.capacity == 2 * BUCKET
    for old, new in zip(before, cache.buffers, strict=True):
        assert new.shape[2] == cache.capacity
        assert torch.equal(new[:, :, :BUCKET], old)
        assert not new[:, :, BUCKET:].any()


def test_a_path_moves_to_the_front_though_source_and_target_overlap() -> None:
    cache = filled()
    before = [buffer.clone() for buffer in cache.buffers]
    cache.move_path(row=1, start=3, nodes=[2, 3, 5])
    for old, new in zip(before, cache.buffers, strict=True):
        assert torch.equal(new[1, :, 4:7], old[1, :, [5, 6, 8]])
        assert torch.equal(new[1, :, :4], old[1, :, :4])
        assert torch.equal(new[1, :, 7:], old[1, :, 7:])
        assert torch.equal(new[[0, 2]], old[[0, 2]])


def test_a_row_moves_whole() -> None:
    cache = filled()
    before = [buffer.clone() for buffer in cache.buffers]
    cache.move_row(source=2, target=0, length=7)
    for old, new in zip(before, cache.buffers, strict=True):
        assert torch.equal(new[0, :, :7], old[2, :, :7])
        assert torch.equal(new[1:], old[1:])


def test_ragged_rows_are_written_where_each_ends() -> None:
    cache = filled()
    before = [buffer.clone() for buffer in cache.buffers]
    starts = torch.tensor([4, 7])
    cache.writing = Writing(first=1, starts=starts, uniform_start=None, columns=2, view=9)
    new = torch.full((2, HEADS, 2, SIZE), 0.5).double()
    keys, values = cache.update(new, -new, 0)
    assert keys.shape == values.shape == (2, HEADS, 9, SIZE)
    assert torch.equal(keys[0, :, 4:6], new[0])
    assert torch.equal(values[1, :, 7:9], -new[1])
    changed = cache.buffers[0] != before[0]
    assert changed[1, :, 4:6].all()
    assert changed[2, :, 7:9].all()
    assert changed.sum() == 2 * HEADS * 2 * SIZE, "nothing else may change"


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rows_that_stay_continue_as_if_the_others_had_never_been(family: str) -> None:
    model = target(family)
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [10, 11], [12, 13, 14, 15], [16, 17, 18]]
    runner = Runner(model, rows=4, max_length=CONTEXT)
    runner.admit(4)
    runner.prefill(0, [prompt[:-1] for prompt in prompts])
    runner.retain([1, 3])
    assert runner.lengths == [1, 2]
    logits = runner.forward(torch.tensor([[11], [18]]), keep=1).logits
    for row, prompt in enumerate([prompts[1], prompts[3]]):
        alone = model(input_ids=torch.tensor([prompt]), use_cache=False).logits
        assert torch.allclose(logits[row, -1], alone[0, -1], atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_prefilling_new_rows_leaves_the_rows_in_use_alone(family: str) -> None:
    model = target(family)
    runner = Runner(model, rows=3, max_length=CONTEXT)
    runner.admit(1)
    runner.prefill(0, [[1, 2, 3, 4, 5, 6, 7, 8]])
    before = [buffer[0].clone() for buffer in runner.cache.buffers]
    runner.admit(2)
    runner.prefill(1, [[9, 8, 7], list(range(20, 32))])
    for old, buffer in zip(before, runner.cache.buffers, strict=True):
        assert torch.equal(old, buffer[0])
    assert runner.lengths == [8, 3, 12]
    logits = runner.forward(torch.tensor([[40], [41], [42]]), keep=1).logits
    for row, prompt in enumerate([[*range(1, 9), 40], [9, 8, 7, 41], [*range(20, 32), 42]]):
        alone = model(input_ids=torch.tensor([prompt]), use_cache=False).logits
        assert torch.allclose(logits[row, -1], alone[0, -1], atol=1e-6)


def test_more_rows_than_the_cache_holds_are_our_own_mistake() -> None:
    runner = Runner(target("llama"), rows=2, max_length=CONTEXT)
    with pytest.raises(AssertionError, match="3 rows in a cache of 2"):
        runner.admit(3)


def test_hundreds_of_requests_leave_nothing_behind() -> None:
    llm = decoder("llama", "draft_model", 3, rows=8)
    first = llm.generate([[1, 2, 3]] * 8, greedy(4))
    held = (llm.engine.target.cache_bytes, llm.engine.drafter.nbytes)
    for _ in range(24):
        llm.generate([[4, 5], [6]] * 4, greedy(2))
    assert (llm.engine.target.cache_bytes, llm.engine.drafter.nbytes) == held
    assert llm.engine.target.lengths == []
    assert not llm.engine.busy
    assert ids(llm.generate([[1, 2, 3]] * 8, greedy(4))) == ids(first)


def test_the_cache_grows_with_the_text() -> None:
    expected = ids(decoder("gemma3").generate([[1, 2, 3]], greedy(24)))
    llm = decoder("gemma3", "draft_model", 3)
    llm.engine.target.runner.cache.capacity = 4
    assert ids(llm.generate([[1, 2, 3]], greedy(24))) == expected
    assert llm.engine.target.runner.cache.capacity >= 27
