"""What heads that attend over texts keep of them: the right entries, and memory for each text."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outpace.heads.layers import KeyValues
from outpace.methods.heads.head_kv_cache import HeadKVCache
from outpace.targets.hf.slot_ranges import SLOT_GRANULARITY

GROUPS, KEY, VALUE, ROWS = 2, 3, 5, 8


class Head:
    """One whose keys and values are of different sizes."""

    def begin(self, rows: int) -> KeyValues:
        return KeyValues(torch.zeros(rows, GROUPS, 0, KEY), torch.zeros(rows, GROUPS, 0, VALUE))


def made(rows: int, count: int) -> KeyValues:
    return KeyValues(torch.randn(rows, GROUPS, count, KEY), torch.randn(rows, GROUPS, count, VALUE))


class Checked:
    """A cache, and the same entries as plain lists."""

    def __init__(self) -> None:
        self.cache = HeadKVCache(Head(), ROWS)
        self.texts: list[tuple[Tensor, Tensor]] = []

    def admit(self, source: int | None = None, length: int = 0) -> None:
        self.cache.admit(source, length)
        none = Head().begin(1)
        keys, values = (none.keys[0], none.values[0]) if source is None else self.texts[source]
        self.texts.append((keys[:, :length], values[:, :length]))

    def append(self, rows: list[int], counts: list[int]) -> None:
        more = made(len(rows), max(counts))
        self.cache.append(rows, more, counts)
        for at, (row, count) in enumerate(zip(rows, counts, strict=True)):
            keys, values = self.texts[row]
            self.texts[row] = (
                torch.cat([keys, more.keys[at, :, :count]], 1),
                torch.cat([values, more.values[at, :, :count]], 1),
            )

    def drop(self, row: int, count: int) -> None:
        self.cache.drop(row, count)
        keys, values = self.texts[row]
        self.texts[row] = keys[:, :-count], values[:, :-count]

    def retain(self, rows: list[int]) -> None:
        self.cache.retain(rows)
        self.texts = [self.texts[row] for row in rows]

    def check(self, rows: list[int]) -> None:
        entries, own = self.cache.of(rows)
        longest = max(self.texts[row][0].shape[1] for row in rows)
        assert entries.keys.shape == (len(rows), GROUPS, longest, KEY)
        assert entries.values.shape == (len(rows), GROUPS, longest, VALUE)
        for at, row in enumerate(rows):
            keys, values = self.texts[row]
            assert own[at].tolist() == [place < keys.shape[1] for place in range(longest)]
            assert torch.equal(entries.keys[at, :, : keys.shape[1]], keys)
            assert torch.equal(entries.values[at, :, : keys.shape[1]], values)


def test_entries_are_those_of_the_row() -> None:
    torch.manual_seed(0)
    checked = Checked()
    for _ in range(4):
        checked.admit()
    checked.check([0, 1, 2, 3])
    checked.append([0, 2], [5, 3])
    checked.append([1, 3], [700, 1])
    checked.append([0, 1, 2, 3], [1, 2, 0, 4])
    for rows in ([0, 1, 2, 3], [1], [0, 3], [2, 0], [2, 3]):
        checked.check(rows)
    checked.admit(1, 650)
    checked.drop(1, 1)
    checked.append([1, 4], [2, 300])
    checked.retain([0, 2, 4])
    checked.append([0, 1, 2], [400, 1, 1])
    checked.admit()
    checked.append([3], [9])
    for rows in ([0, 1, 2, 3], [3], [1, 3]):
        checked.check(rows)


@pytest.mark.parametrize("ends", [False, True])
def test_one_long_text_does_not_cost_its_length_for_each_row(ends: bool) -> None:
    """8 rows of which one has 20,000 entries held 8 x 32,768 of them."""
    checked = Checked()
    for _ in range(ROWS):
        checked.admit()
    for _ in range(20):
        checked.append(list(range(ROWS)), [1000, *[2] * (ROWS - 1)])
    checked.check(list(range(ROWS)))
    if ends:
        checked.retain(list(range(1, ROWS)))
        checked.append([0], [1])
        checked.check(list(range(ROWS - 1)))
    slots = checked.cache.nbytes // (GROUPS * (KEY + VALUE) * 4)
    texts = 0 if ends else 20_000
    assert slots <= 4 * texts + 4 * ROWS * SLOT_GRANULARITY


def test_texts_of_about_one_length_are_read_in_place() -> None:
    checked = Checked()
    for _ in range(4):
        checked.admit()
    checked.append([0, 1, 2, 3], [100, 110, 120, 90])
    keys = checked.cache.of([0, 1, 2, 3])[0].keys
    assert keys.untyped_storage().nbytes() > keys.nbytes, "a view of the whole cache"
