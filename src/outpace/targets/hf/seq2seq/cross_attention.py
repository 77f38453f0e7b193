"""The cross-attention cache of a decoder: keys and values of each row's source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SPARSE = 4
"""The buffers are made smaller when the longest source needs one in this many slots or less."""


@dataclass(frozen=True, eq=False)
class CrossAttentionLayer:
    """One layer's keys and values of A rows, ``[A, H, S, D]``."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, eq=False)
class VisibleSources:
    """What A consecutive rows see of their sources."""

    layers: Sequence[CrossAttentionLayer]
    visible: Tensor | None
    """``[A, S]``, which slots are a row's own source; None where all of them are."""
    slots: int
    """S."""


class CrossAttentionCache:
    """Buffers ``[rows, H, S, D]`` of each layer's keys and values; row a is row a of the batch.

    A source is written once, when it has been encoded, and never changes. Rows that leave are
    closed up, so that every pass reads its rows in place.
    """

    def __init__(self, rows: int) -> None:
        """rows: how many there can be."""
        self.rows = rows
        self._lengths: list[int] = []  # by row; 0: not encoded yet
        self._buffers: list[Tensor] = []  # keys and values of the first layer, of the second, ...
        self._seen: dict[tuple[int, int], VisibleSources] = {}  # until a row changes

    @property
    def active(self) -> int:
        """How many rows there are."""
        return len(self._lengths)

    def holds(self, row: int) -> bool:
        """Whether the source of a row has been encoded."""
        return self._lengths[row] > 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def admit(self, count: int) -> None:
        """Adds rows whose sources are not encoded yet."""
        if self.active + count > self.rows:
            raise AssertionError(f"{self.active} + {count} rows in a cache of {self.rows}")
        self._lengths += [0] * count
        self._seen.clear()

    @torch.inference_mode()
    def put(self, row: int, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Writes the keys and values ``[H, S, D]`` of a row's source, layer by layer."""
        parts = [part for layer in layers for part in layer]
        length = parts[0].shape[1]
        if not self._buffers or length > self._slots:
            self._exchange(parts, length)
        for buffer, part in zip(self._buffers, parts, strict=True):
            buffer[row, :, :length] = part
            buffer[row, :, length:] = 0  # a masked slot that held NaN would still poison 0 * NaN
        self._lengths[row] = length
        self._seen.clear()

    @torch.inference_mode()
    def fork(self, row: int) -> None:
        """Adds a row with the source of another one."""
        self.admit(1)
        for buffer in self._buffers:
            buffer[self.active - 1] = buffer[row]
        self._lengths[-1] = self._lengths[row]

    @torch.inference_mode()
    def retain(self, rows: Sequence[int]) -> None:
        """Keeps only these rows (ascending), numbered from 0 on."""
        first = next((at for at, row in enumerate(rows) if at != row), len(rows))
        for buffer in self._buffers:
            for at in range(first, len(rows)):  # ascending: what is overwritten was copied before
                buffer[at] = buffer[rows[at]]
        self._lengths = [self._lengths[row] for row in rows]
        self._seen.clear()
        longest = max(self._lengths, default=0)
        if not longest:
            self._buffers = []
        elif longest * SPARSE <= self._slots:
            self._exchange([buffer[0] for buffer in self._buffers], longest)

    def reset(self) -> None:
        """Forgets all rows, whatever state an interruption has left."""
        self._lengths, self._buffers = [], []
        self._seen.clear()

    def seen(self, first: int, count: int) -> VisibleSources:
        """Returns what ``count`` rows from ``first`` on see, of which all are encoded."""
        found = self._seen.get((first, count))
        if found is None:
            found = self._seen[first, count] = self._view(first, count)
        return found

    @property
    def _slots(self) -> int:
        return self._buffers[0].shape[2]

    def _view(self, first: int, count: int) -> VisibleSources:
        lengths = self._lengths[first : first + count]
        longest = max(lengths)
        parts = [buffer[first : first + count, :, :longest] for buffer in self._buffers]
        layers = [CrossAttentionLayer(*parts[at : at + 2]) for at in range(0, len(parts), 2)]
        if min(lengths) == longest:
            return VisibleSources(layers, None, longest)
        own = torch.tensor(lengths, device=parts[0].device)
        slots = torch.arange(longest, device=parts[0].device)
        return VisibleSources(layers, slots < own[:, None], longest)

    def _exchange(self, like: Sequence[Tensor], slots: int) -> None:
        """Makes other buffers, of ``slots`` slots. like: ``[H, _, D]`` for each buffer."""
        made = [part.new_zeros(self.rows, part.shape[0], slots, part.shape[2]) for part in like]
        for new, old in zip(made, self._buffers, strict=False):  # there are none at first
            kept = min(slots, old.shape[2])
            new[: self.active, :, :kept] = old[: self.active, :, :kept]
        self._buffers = made
