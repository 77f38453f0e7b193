"""The entries of several texts, of different lengths, that a head attends over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from outpace.core.transfer import to_device
from outpace.heads.attending.base import Entries, Sight
from outpace.targets.hf.cache import SlotCache, seen
from outpace.targets.hf.extents import PassSlots


class Beginning(Protocol):
    """A head that keeps entries of texts."""

    def begin(self, rows: int) -> Entries:
        """Returns no entries of n rows."""


class TextCache:
    """Keys and values by row, in slots like those of a target: each text takes memory for itself.

    Rows are numbered from 0. Entries behind a row's length are left over from other texts, and
    nobody attends to them.
    """

    def __init__(self, head: Beginning, rows: int) -> None:
        """rows: how many there may be."""
        self._none = head.begin(1)
        self._slots = SlotCache(rows, self._none.keys.device)
        self._layer: Any = self._slots.layers[0]
        self._layer.lazy_initialization(self._none.keys, self._none.values)
        self.lengths: list[int] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all entries, with the room for more."""
        return self._slots.nbytes

    def admit(self, source: int | None = None, length: int = 0) -> None:
        """Adds a row: an empty one, or the first entries of a present one."""
        if source is None:
            self._slots.admit(1)
        else:
            self._slots.fork(source, length)
        self.lengths.append(length)

    def retain(self, rows: Sequence[int]) -> None:
        """Keeps only these rows, numbered anew."""
        self._slots.retain(rows)
        self.lengths = [self.lengths[row] for row in rows]

    def of(self, rows: Sequence[int]) -> tuple[Entries, Tensor]:
        """Returns the entries of some rows, as many as the longest has, and which of them are a
        row's own, ``[B, L]`` bool. They may be views, which the next `append` writes over."""
        lengths = [self.lengths[row] for row in rows]
        longest, device = max(lengths), self._none.keys.device
        own = torch.arange(longest, device=device) < to_device(lengths, device)[:, None]
        return self._entries(list(rows), longest), own

    def next_of(self, rows: Sequence[int], count: int) -> Sight:
        """Returns the sight of the next ``count`` entries of some rows: each sees those of its own
        row that come before it, and itself."""
        before, own = self.of(rows)
        begin = to_device([self.lengths[row] for row in rows], own.device)
        columns = torch.arange(count, device=own.device)
        causal = (columns <= columns[:, None]).expand(len(rows), -1, -1)
        visible = torch.cat([own[:, None].expand(-1, count, -1), causal], -1)
        return Sight(begin[:, None] + columns, before, visible)

    @torch.inference_mode()
    def append(self, rows: Sequence[int], more: Entries, counts: Sequence[int]) -> None:
        """Adds the first n entries of ``more`` to each of the rows."""
        needed = list(self.lengths)
        for row, count in zip(rows, counts, strict=True):
            needed[row] += count
        self._slots.reserve(0, needed)
        for at, (row, count) in enumerate(zip(rows, counts, strict=True)):
            begin = self.lengths[row]
            for slots, new in zip(self._slots.row(row), (more.keys, more.values), strict=True):
                slots[:, begin : begin + count] = new[at, :, :count]
        self.lengths = needed

    def drop(self, row: int, count: int) -> None:
        """Takes the last n entries of a row away."""
        self.lengths[row] -= count

    def _entries(self, rows: list[int], count: int) -> Entries:
        """The first ``count`` slots of some rows."""
        if not count:
            keys, values = self._none.keys, self._none.values
            return Entries(keys.expand(len(rows), -1, -1, -1), values.expand(len(rows), -1, -1, -1))
        if rows != list(range(rows[0], rows[0] + len(rows))):
            alone = [self._entries([row], count) for row in rows]
            return Entries(
                torch.cat([each.keys for each in alone]), torch.cat([each.values for each in alone])
            )
        placement = self._slots.placement(rows[0], len(rows))
        starts = to_device([self.lengths[row] for row in rows], self._none.keys.device)
        slots = PassSlots(placement, starts, None, columns=0, view=count)
        return Entries(seen(self._layer.keys, slots), seen(self._layer.values, slots))
