"""One layer's buffers in a `SlotCache`: where a pass writes keys and values, and which of them
attention sees."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from outpace.targets.hf.kv_dtype import KVQuantization
from outpace.targets.hf.slot_ranges import PassSlots, SlotRange


class Owner(Protocol):
    """What layers ask their cache."""

    bits: KVQuantization | None
    capacity: int
    slots: PassSlots

    def new_layer(self, index: int) -> SlotLayer: ...


class SlotLayer(CacheLayerMixin):
    """One layer's buffers ``[H, S, D]``, made when the first keys arrive."""

    NAMES = ("keys", "values", "key_scales", "value_scales", "index")
    """The buffers that there may be."""
    is_compileable = False
    is_croppable = False
    is_sliding = False
    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None
    """``[H, S, 1]``, where keys and values are held in 8 bits."""
    index: Tensor | None = None
    """``[1, S, D]``: keys by which an indexer picks the tokens that attention sees."""

    def __init__(self, owner: Owner) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Not the cache itself: memory would only be free once the garbage collector has run.
        self._owner: Owner = weakref.proxy(owner)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        bits, slots, both = self._owner.bits, self._owner.capacity, (key_states, value_states)
        kind = None if bits is None else torch.int8
        # Zeros: a masked slot that held NaN would still poison 0 * NaN.
        self.keys, self.values = (
            states.new_zeros(states.shape[1], slots, states.shape[3], dtype=kind) for states in both
        )
        if bits is not None:
            self.key_scales, self.value_scales = (
                states.new_zeros(states.shape[1], slots, 1) for states in both
            )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes the new keys and values; returns what attention may see, ``[A, H, view, D]``."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        slots = self._owner.slots.on(key_states.device)
        self._put(self.keys, self.key_scales, key_states, slots)
        self._put(self.values, self.value_scales, value_states, slots)
        return self.shown(slots)

    def _put(self, buffer: Tensor, scales: Tensor | None, states: Tensor, slots: PassSlots) -> None:
        bits = self._owner.bits
        if bits is not None and scales is not None:
            states, of_states = bits.rounded(states)
            _write(scales, of_states, slots)
        _write(buffer, states, slots)

    def shown(self, slots: PassSlots) -> tuple[Tensor, Tensor]:
        """Returns the keys and values that may be seen, ``[A, H, view, D]``, in the model's dtype.
        slots: on the layer's device."""
        keys, values, bits = seen(self.keys, slots), seen(self.values, slots), self._owner.bits
        if bits is None or self.key_scales is None or self.value_scales is None:
            return keys, values
        return (
            bits.dequantized(keys, seen(self.key_scales, slots)),
            bits.dequantized(values, seen(self.value_scales, slots)),
        )

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Writes an indexer's new keys ``[A, T, D]``; returns what it may see, ``[A, view, D]``."""
        states = indexer_key_states[:, None]
        slots = self._owner.slots.on(states.device)
        if self.index is None:
            self.index = states.new_zeros(1, self._owner.capacity, states.shape[3])
        _write(self.index, states, slots)
        return seen(self.index, slots)[:, 0]

    def update_index(self, idx_k: Tensor) -> Tensor:
        """The same for keys with a dimension of heads, ``[A, 1, T, D]``: so MiniMax M3 calls it."""
        return self.update_indexer(idx_k[:, 0])[:, None]

    @property
    def buffers(self) -> list[Tensor]:
        """Those that exist, ``[H, S, D]``."""
        found = (getattr(self, name) for name in self.NAMES)
        return [buffer for buffer in found if buffer is not None]

    def exchange(self, moves: Sequence[tuple[SlotRange, SlotRange]], capacity: int) -> None:
        """Makes buffers of another size, with the content of ranges at their new places."""
        for name in self.NAMES:
            buffer = getattr(self, name)
            if buffer is not None:
                setattr(self, name, _moved(buffer, moves, capacity))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.slots.view, 0

    def get_seq_length(self) -> int:
        return self._owner.slots.uniform_start or 0

    def get_max_length(self) -> int:
        return -1


def _write(buffer: Tensor, states: Tensor, slots: PassSlots) -> None:
    """Puts states ``[A, H, T, D]`` where they belong in a buffer ``[H, S, D]``."""
    spacing, start = slots.spacing, slots.uniform_start
    if spacing is not None and start is not None:
        first = spacing.first + start
        _rows_of(buffer, slots.rows, first, spacing.distance, slots.columns).copy_(states)
    else:
        buffer.index_copy_(1, slots.slot_mapping, states.transpose(0, 1).flatten(1, 2))


def seen(buffer: Tensor, slots: PassSlots) -> Tensor:
    """Returns ``[A, H, view, D]``: a view, or a copy where rows are at unequal distances."""
    spacing = slots.spacing
    if spacing is not None:
        return _rows_of(buffer, slots.rows, spacing.first, spacing.distance, slots.view)
    heads, _, dim = buffer.shape
    copied = buffer.index_select(1, slots.seen).view(heads, slots.rows, -1, dim)
    return copied.transpose(0, 1)


def _rows_of(buffer: Tensor, rows: int, first: int, distance: int, count: int) -> Tensor:
    """Returns a view ``[rows, H, count, D]`` of a buffer: ``count`` slots of every row."""
    heads, slots, dim = buffer.shape
    strides = (distance * dim, slots * dim, dim, 1)
    return buffer.as_strided((rows, heads, count, dim), strides, first * dim)


class SlotLayers(list[SlotLayer]):
    """A cache's layers, each of which is made when it is looked up first: models look up those that
    hold nothing yet, too."""

    def __init__(self, owner: Owner) -> None:
        super().__init__()
        self._owner: Owner = weakref.proxy(owner)

    def __getitem__(self, index: Any) -> Any:
        while isinstance(index, int) and len(self) <= index:
            self.append(self._owner.new_layer(len(self)))
        return super().__getitem__(index)


def copy_range(source: Tensor, old: SlotRange, target: Tensor, new: SlotRange) -> None:
    """Copies what is in a range of a buffer ``[H, S, D]`` into one of another."""
    size = min(old.size, new.size)
    target.narrow(1, new.first, size).copy_(source.narrow(1, old.first, size))


def _moved(buffer: Tensor, moves: Iterable[tuple[SlotRange, SlotRange]], capacity: int) -> Tensor:
    """Returns a buffer of ``capacity`` slots with the content of ranges at their new places."""
    heads, _, dim = buffer.shape
    exchanged = buffer.new_zeros(heads, capacity, dim)
    for old, new in moves:
        copy_range(buffer, old, exchanged, new)
    return exchanged
