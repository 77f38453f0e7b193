"""The entries of several texts, of different lengths, that a head attends over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from outpace.core.transfer import to_device
from outpace.heads.attending.base import Entries, Sight

ROOM = 64
"""Entries, at least, for which room is added where there is too little."""


class Beginning(Protocol):
    """A head that keeps entries of texts."""

    def begin(self, rows: int) -> Entries:
        """Returns no entries of so many rows."""


class TextCache:
    """Keys and values by row. Rows are numbered from 0. Entries behind a row's length are left over
    from other texts, and nobody attends to them."""

    def __init__(self, head: Beginning) -> None:
        self._head = head
        self._held = head.begin(0)  # of all rows, with room for more
        self.lengths: list[int] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all entries, with the room for more."""
        return self._held.keys.nbytes + self._held.values.nbytes

    @torch.inference_mode()
    def admit(self, source: int | None = None, length: int = 0) -> None:
        """Adds a row: an empty one, or the first entries of a present one."""
        if source is None:
            new = _longer(self._head.begin(1), len(self._held))
        else:
            new = self._of([source])
        self._held = Entries(
            torch.cat([self._held.keys, new.keys]), torch.cat([self._held.values, new.values])
        )
        self.lengths.append(length)

    @torch.inference_mode()
    def retain(self, rows: Sequence[int]) -> None:
        """Keeps only these rows, numbered anew."""
        self._held = self._of(rows)
        self.lengths = [self.lengths[row] for row in rows]
        room = max(self.lengths, default=0) + ROOM
        if len(self._held) > 2 * room:  # a long text has ended
            keys, values = self._held.keys, self._held.values
            self._held = Entries(keys[:, :, :room].clone(), values[:, :, :room].clone())

    def of(self, rows: Sequence[int]) -> tuple[Entries, Tensor]:
        """Returns the entries of some rows, as many as the longest has, and which of them are a
        row's own, ``[B, L]`` bool."""
        lengths = [self.lengths[row] for row in rows]
        longest, held = max(lengths), self._of(rows)
        device = held.keys.device
        own = torch.arange(longest, device=device) < to_device(lengths, device)[:, None]
        return Entries(held.keys[:, :, :longest], held.values[:, :, :longest]), own

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
        """Adds the first so many entries of ``more`` to each of the rows."""
        places = [(row, self.lengths[row] + i) for row, n in zip(rows, counts, strict=True)
                  for i in range(n)]  # fmt: skip
        taken = [(at, i) for at, n in enumerate(counts) for i in range(n)]
        for row, count in zip(rows, counts, strict=True):
            self.lengths[row] += count
        self._make_room()
        device = self._held.keys.device
        at, place = to_device(places, device).view(-1, 2).unbind(1)
        source, column = to_device(taken, device).view(-1, 2).unbind(1)
        self._held.keys[at, :, place] = more.keys[source, :, column]
        self._held.values[at, :, place] = more.values[source, :, column]

    def drop(self, row: int, count: int) -> None:
        """Takes the last so many entries of a row away."""
        self.lengths[row] -= count

    def _of(self, rows: Sequence[int]) -> Entries:
        if list(rows) == list(range(self._held.keys.shape[0])):
            return self._held
        index = to_device(list(rows), self._held.keys.device)
        return Entries(self._held.keys[index], self._held.values[index])

    def _make_room(self) -> None:
        missing = max(self.lengths) - len(self._held)
        if missing > 0:
            self._held = _longer(self._held, max(missing, ROOM, len(self._held)))


def _longer(entries: Entries, more: int) -> Entries:
    """Returns entries with room for so many more behind them."""
    return Entries(pad(entries.keys, (0, 0, 0, more)), pad(entries.values, (0, 0, 0, more)))
