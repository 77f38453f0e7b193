"""Keys and values in slots: a preallocated cache in which rolling back is a number.

    row b    | 0 ........... length_b | this pass: pending, then nodes | free ...
    slot     |   committed            | length_b + column              |

A forward pass writes at ``length + column``; what is accepted becomes committed when the length
advances, what is not is overwritten by the next pass. No tensor moves for a chain. For a tree the
accepted path is moved to the front by one gather and one scatter per buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from outpace.core.transfer import to_device

BUCKET = 256
"""Capacity grows in multiples of this, then by doubling, so that it takes few different values."""


@dataclass(frozen=True, eq=False)
class Writing:
    """Where the current pass writes, for A consecutive rows starting at ``first``."""

    first: int
    starts: Tensor  # [A] on the device
    uniform_start: int | None  # the start of every row, if they agree
    columns: int  # T
    view: int  # slots that attention may see

    @property
    def rows(self) -> int:
        return self.starts.shape[0]

    @cached_property
    def where(self) -> tuple[Tensor, Tensor]:
        """Row ``[A, 1]`` and slot ``[A, T]`` of each column: one pair for all layers of a pass."""
        row = torch.arange(self.rows, device=self.starts.device)[:, None]
        return row, self.starts[:, None] + torch.arange(self.columns, device=self.starts.device)

    def located(self) -> Writing:
        """Returns itself with ``where`` at hand, which a compiled forward cannot work out."""
        _ = self.where
        return self


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's buffers ``[R, H, S, D]``, made when the first keys arrive."""

    is_compileable = False
    is_croppable = False
    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, owner: SlotCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, slots = self._owner.rows, self._owner.capacity
        self.keys, self.values = (
            # Zeros: a masked slot that held NaN would still poison 0 * NaN.
            x.new_zeros(rows, x.shape[1], slots, x.shape[3])
            for x in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes the new keys and values; returns what attention may see, ``[A, H, view, D]``."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        plan = self._owner.writing
        return _write(self.keys, key_states, plan), _write(self.values, value_states, plan)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.writing.view, 0

    def get_seq_length(self) -> int:
        return self._owner.writing.uniform_start or 0

    def get_max_length(self) -> int:
        return -1


def _write(buffer: Tensor, new: Tensor, plan: Writing) -> Tensor:
    rows = buffer.narrow(0, plan.first, plan.rows)
    if plan.uniform_start is not None:
        rows.narrow(2, plan.uniform_start, plan.columns).copy_(new)
    else:
        row, slot = plan.where
        rows[row, :, slot] = new.transpose(1, 2)
    return rows.narrow(2, 0, plan.view)


class SlotCache(Cache):
    """Slot buffers of all layers for a fixed number of rows."""

    def __init__(self, rows: int, capacity: int = BUCKET) -> None:
        super().__init__(layers=[])
        self.rows = rows
        self.capacity = capacity
        self.writing: Writing

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self._layer(layer_idx).update(key_states, value_states)
        return keys, values

    def room(self, layer_idx: int, heads: int, dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a layer's buffers ``[.., heads, S, dim]``, from the first row of the pass on, for
        a layer that writes by itself; like: of the dtype and device that they should have."""
        layer = self._layer(layer_idx)
        if not layer.is_initialized:
            head = like.new_empty(1, heads, 1, dim)
            layer.lazy_initialization(head, head)
        first = self.writing.first
        return (layer.keys[first:], layer.values[first:]) if first else (layer.keys, layer.values)

    def _layer(self, index: int) -> SlotLayer:
        while len(self.layers) <= index:
            self.layers.append(SlotLayer(self))
        layer: Any = self.layers[index]
        return layer  # type: ignore[no-any-return]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.writing.uniform_start or 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.writing.view, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.writing.uniform_start or 0

    @property
    def _slots(self) -> list[SlotLayer]:
        return [layer for layer in self.layers if isinstance(layer, SlotLayer)]

    @property
    def buffers(self) -> list[Tensor]:
        """All key and value buffers that exist by now."""
        made = [layer for layer in self._slots if layer.is_initialized]
        return [buffer for layer in made for buffer in (layer.keys, layer.values)]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def reserve(self, slots: int) -> None:
        """Makes room for ``slots`` slots in every row; what is cached stays."""
        if slots <= self.capacity:
            return
        wanted = -(-slots // BUCKET) * BUCKET
        self.capacity = max(wanted, 2 * self.capacity)
        for layer in self._slots:
            if layer.is_initialized:
                extra = self.capacity - layer.keys.shape[2]
                layer.keys = torch.nn.functional.pad(layer.keys, (0, 0, 0, extra))
                layer.values = torch.nn.functional.pad(layer.values, (0, 0, 0, extra))

    def move_path(self, row: int, start: int, nodes: Sequence[int]) -> None:
        """Moves a row's slots ``start + node`` to ``start + 1, start + 2, ...`` in path order."""
        moving = [at for at, node in enumerate(nodes, 1) if at != node]
        if not moving:
            return
        first = moving[0]  # whatever comes before is where it belongs
        buffers = self.buffers
        source = to_device(nodes[first - 1 :], buffers[0].device) + start
        for buffer in buffers:
            slots = buffer[row]  # [H, S, D]
            # Selecting copies before it is written, so that source and target may overlap.
            moved = slots.index_select(1, source)
            slots.narrow(1, start + first, len(source)).copy_(moved)

    def move_row(self, source: int, target: int, length: int) -> None:
        """Copies the first ``length`` slots of one row to another."""
        for buffer in self.buffers:
            buffer[target, :, :length] = buffer[source, :, :length]
