"""Keys and values in slots: a preallocated cache in which rolling back is a number.

    row a    | 0 ........... length_a | this pass: pending, then nodes | free ...
    slot     |   committed            | length_a + column              |

A forward pass writes at ``length + column``; what is accepted becomes committed when the length
advances, what is not is overwritten by the next pass. No tensor moves for a chain. For a tree the
accepted path is moved to the front by one gather and one scatter per buffer.

Each layer has one buffer for the slots of all rows, ``[H, S, D]``, and each row a range of its own
in it. A row that becomes longer than its range gets one of twice the size; the others stay where
they are, and so they do when a row ends. Where the buffers themselves are exchanged for larger or
smaller ones, all has to be copied anyhow, and the rows are put next to each other again.

Keys and values may be held in 8 bits (`kv_dtype`): then a layer has buffers of their scales, too,
``[H, S, 1]``, which are moved, copied and saved like all others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask

from outpace.core.transfer import to_device
from outpace.targets.base import KVCacheDtype
from outpace.targets.hf.kv_dtype import EIGHT_BITS
from outpace.targets.hf.prefixes import SavedPrefix
from outpace.targets.hf.slot_layer import SlotLayer, SlotLayers, copy_range
from outpace.targets.hf.slot_ranges import (
    NO_SLOTS,
    SLOT_GRANULARITY,
    PassSlots,
    Placement,
    SlotAllocator,
    SlotRange,
    equalize,
    grown,
    rounded,
    spacing_of,
)

CACHE_ARGUMENTS = ("past_key_values", "cache")
"""What models and their layers call their cache: the second from transformers 5.24 on."""

SPARSE = 4
"""The buffers are made smaller when the rows need no more than one in this many of their slots."""


def find_cache(options: Mapping[str, Any]) -> Any:
    """Returns the cache among the arguments that a layer is given; None where there is none."""
    return next((options[name] for name in CACHE_ARGUMENTS if options.get(name) is not None), None)


def cache_name(forward: Callable[..., Any]) -> str:
    """Returns by which name a ``forward`` takes its cache; where it takes any, that of
    transformers' own functions."""
    for known in map(inspect.signature, (forward, create_causal_mask)):
        for name in CACHE_ARGUMENTS:
            if name in known.parameters:
                return name
    return CACHE_ARGUMENTS[0]


class SlotCache(Cache):
    """Slot buffers of all layers, for at most ``rows`` rows."""

    layers: Any

    def __init__(
        self, rows: int, device: torch.device | str = "cpu", kv_cache_dtype: KVCacheDtype = "auto"
    ) -> None:
        # Not super(): a subclass may also be of a cache class that one model insists on.
        made: Any = SlotLayers(self)
        Cache.__init__(self, layers=made)
        self.rows = rows
        self.bits = EIGHT_BITS[kv_cache_dtype]
        """How keys and values are held in 8 bits; None: as they are."""
        self.spare = SLOT_GRANULARITY if rows > 1 else 0
        """Slots at the end of each buffer, which no row has: rows that are only padding write there
        (`padded_placement`)."""
        self.capacity = 0
        """Slots of each buffer."""
        self.generation = 0
        """How often the buffers were exchanged: until then they stay where they are."""
        self.slots: PassSlots
        """The slots of the current pass."""
        self._device = torch.device(device)
        self._allocator = SlotAllocator(0)
        self._ranges: list[SlotRange] = []  # by row
        self._rows_left = False  # since the ranges were last reviewed
        # The first and last slot of each row, on the device and always in the same place, so that
        # a recorded pass finds there how the rows lie now.
        self._bounds: Tensor | None = None  # [2, rows]
        self._bounds_known = False  # until a range changes
        self._placements: dict[tuple[int, int], Placement] = {}  # likewise

    # -- what transformers asks for --------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self._layer(layer_idx).update(key_states, value_states)
        return keys, values

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        return self._layer(layer_idx).update_indexer(indexer_key_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.slots.uniform_start or 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.slots.view, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.slots.uniform_start or 0

    # -- buffers ---------------------------------------------------------------------------------

    def buffers_of(
        self, layer_idx: int, heads: int, keys: int, values: int, like: Tensor
    ) -> SlotLayer:
        """Returns the buffers ``[heads, S, keys]`` and ``[heads, S, values]`` of a layer that
        writes and reads its keys and values by itself. like: a tensor of the dtype and device of
        the model."""
        layer = self._layer(layer_idx)
        if not layer.is_initialized:
            layer.lazy_initialization(*(like.new_empty(1, heads, 1, dim) for dim in (keys, values)))
        return layer

    def _layer(self, index: int) -> SlotLayer:
        layer: SlotLayer = self.layers[index]
        return layer

    def new_layer(self, index: int) -> SlotLayer:
        """Returns a layer without buffers."""
        return SlotLayer(self)

    @property
    def _made(self) -> list[SlotLayer]:
        slot_layers = [layer for layer in self.layers if isinstance(layer, SlotLayer)]
        return [layer for layer in slot_layers if layer.is_initialized]

    @property
    def buffers(self) -> list[Tensor]:
        """All buffers ``[H, S, D]`` of all layers that exist by now."""
        return [buffer for layer in self._made for buffer in layer.buffers]

    def row(self, row: int) -> list[Tensor]:
        """Returns one row's part of each buffer, ``[H, its slots, D]``, as views."""
        slot_range = self._ranges[row]
        return [buffer.narrow(1, slot_range.first, slot_range.size) for buffer in self.buffers]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for buffer in self.buffers)

    # -- rows ------------------------------------------------------------------------------------

    @property
    def active(self) -> int:
        """How many rows there are."""
        return len(self._ranges)

    @property
    def longest(self) -> int:
        """The slots of the row that has the most."""
        return max((slot_range.size for slot_range in self._ranges), default=0)

    def admit(self, count: int) -> None:
        """Adds ``count`` rows after the others. They have no slots yet: see `reserve`."""
        if len(self._ranges) + count > self.rows:
            raise AssertionError(f"{len(self._ranges)} + {count} rows in a cache of {self.rows}")
        self._ranges += [NO_SLOTS] * count
        self._forget_placements()

    def reset(self) -> None:
        """Forgets all rows and drops the buffers, whatever state an interruption has left."""
        self.layers = SlotLayers(self)
        self.capacity = 0
        self.generation += 1
        self._allocator = SlotAllocator(0)
        self._ranges = []
        self._rows_left = False
        self._forget_placements()

    def retain(self, rows: Sequence[int]) -> None:
        """Keeps only these rows (ascending), numbered from 0 on. Nothing is moved: the slots of the
        others are free from now on."""
        kept = [self._ranges[row] for row in rows]
        for row in set(range(len(self._ranges))).difference(rows):
            self._allocator.release(self._ranges[row])
        self._ranges = kept
        self._rows_left = True
        self._forget_placements()

    @torch.inference_mode()
    def fork(self, source: int, length: int) -> int:
        """Adds a row with a copy of the first ``length`` slots of another; returns its number."""
        row = len(self._ranges)
        self.admit(1)
        self.reserve(row, [max(length, self._ranges[source].size)])
        for old, new in zip(self.row(source), self.row(row), strict=True):
            new[:, :length] = old[:, :length]
        return row

    def saved(self, row: int, length: int) -> SavedPrefix:
        """Returns copies of what is cached of the first ``length`` tokens of a row."""
        return SavedPrefix([slots[:, :length].clone() for slots in self.row(row)])

    @torch.inference_mode()
    def restore(self, row: int, saved: SavedPrefix, length: int) -> None:
        """Writes the first ``length`` tokens of a text that was `saved` into a row."""
        self.reserve(row, [length])
        for slots, kept in zip(self.row(row), saved.slots, strict=True):
            slots[:, :length] = kept[:, :length]

    # What a cache with states (`recurrent.states`) has more to do for.

    def restorable_length(self, row: int, length: int) -> int:
        """Returns the greatest length up to ``length`` at which a row can go on: any."""
        return length

    def keep_checkpoint(self, row: int, length: int) -> None:
        """Sees to it that a row can be forked after its first ``length`` tokens, however long it
        grows."""

    def drop_checkpoints(self, lengths: Sequence[int], rollback: int) -> None:
        """Takes the rows' lengths for good: none will go back by more than ``rollback`` tokens."""

    def reserve(self, first: int, needed: Sequence[int], shrink: bool = True) -> None:
        """Makes sure that the rows from ``first`` on have this many slots or more; what is cached
        stays. It is called before each pass, never in one: buffers may be exchanged.

        shrink: whether smaller buffers may be made where most of the slots are free.
        """
        ranges = self._ranges
        growing = {}
        for row, slots in enumerate(needed, first):
            if slots > ranges[row].size:
                growing[row] = grown(ranges[row].size, slots)
        if growing or self._rows_left:
            self._rows_left = False
            self._rearrange(growing, shrink)

    @torch.inference_mode()
    def _rearrange(self, growing: Mapping[int, int], shrink: bool) -> None:
        """Gives rows ranges of new sizes, after other rows may have left."""
        sizes = [growing.get(row, slot_range.size) for row, slot_range in enumerate(self._ranges)]
        if shrink and self._worth_shrinking(sum(sizes)):
            self._exchange_buffers(sizes, at_least=0)
        elif growing and not self._take_free_slots(growing):
            self._exchange_buffers(sizes, at_least=rounded(self.capacity * 3 // 2))

    def _worth_shrinking(self, needed: int) -> bool:
        # Not for the sake of a few short rows: all that is cached has to be copied.
        lent = self.capacity - self.spare
        return lent > self.rows * SLOT_GRANULARITY and needed * SPARSE <= lent

    def _take_free_slots(self, growing: Mapping[int, int]) -> bool:
        """Gives rows ranges of new sizes in the buffers as they are; returns whether there was
        room. Rows that come or grow together are put next to each other if possible."""
        sizes = list(growing.values())
        take = self._allocator.take
        taken = take(equalize(sizes)) or take(sizes) or self._take_each(sizes)
        if taken is None:
            return False
        for row, new in zip(growing, taken, strict=True):
            old = self._ranges[row]
            for buffer in self.buffers:
                # A masked slot that held somebody's NaN would still poison 0 * NaN.
                buffer.narrow(1, new.first, new.size).zero_()
                copy_range(buffer, old, buffer, new)
            self._allocator.release(old)
            self._ranges[row] = new
        self._forget_placements()
        return True

    def _take_each(self, sizes: Sequence[int]) -> list[SlotRange] | None:
        """Takes ranges wherever there is room for one; returns None, and takes none, where there
        is not room for all."""
        taken: list[SlotRange] = []
        for size in sizes:
            found = self._allocator.take([size])
            if found is None:
                for slot_range in taken:
                    self._allocator.release(slot_range)
                return None
            taken += found
        return taken

    def _exchange_buffers(self, sizes: Sequence[int], at_least: int) -> None:
        """Makes other buffers, with the rows next to each other in them, and copies what is cached.

        at_least: slots of the new buffers, if the rows need no more.
        """
        sizes = equalize(sizes)
        self.generation += 1  # first: who is stopped on the way leaves no pointer that seems valid
        self.capacity = max(at_least, sum(sizes) + self.spare)
        self._allocator = SlotAllocator(self.capacity - self.spare)
        ranges = self._allocator.take(sizes)
        assert ranges is not None
        moves = list(zip(self._ranges, ranges, strict=True))
        for layer in self._made:
            layer.exchange(moves, self.capacity)
        self._ranges = ranges
        self._forget_placements()

    # -- passes ----------------------------------------------------------------------------------

    def placement(self, first: int, count: int) -> Placement:
        """Returns where ``count`` rows from ``first`` on lie."""
        self._know_bounds()
        found = self._placements.get((first, count))
        if found is None:
            assert self._bounds is not None
            ranges = self._ranges[first : first + count]
            firsts, lasts = self._bounds.narrow(1, first, count).unbind()
            shortest = min(slot_range.size for slot_range in ranges)
            found = Placement(firsts, lasts, spacing_of(ranges), shortest)
            self._placements[first, count] = found
        return found

    @property
    def begins(self) -> bool:
        """Whether its first row lies at the beginning of the buffers."""
        return self._ranges[0].first == 0

    def padded_placement(self, count: int) -> Placement:
        """Returns where the first ``count`` rows lie, also those that are missing: these share the
        `spare` slots. It holds for good: the device looks up how the rows lie now."""
        self._know_bounds()
        assert self._bounds is not None
        firsts, lasts = self._bounds.narrow(1, 0, count).unbind()
        return Placement(firsts, lasts, spacing=None, shortest=0)

    def _forget_placements(self) -> None:
        """Is called whenever a range has changed."""
        self._placements.clear()
        self._bounds_known = False

    @torch.inference_mode()
    def _know_bounds(self) -> None:
        """Writes the rows' bounds to the device, unless they are there."""
        if self._bounds_known:
            return
        if self._bounds is None:
            self._bounds = torch.zeros(2, self.rows, dtype=torch.long, device=self._device)
        missing = [SlotRange(self.capacity - self.spare, self.spare)] * (self.rows - self.active)
        bounds = [(each.first, max(each.first, each.end - 1)) for each in self._ranges + missing]
        self._bounds.copy_(to_device(bounds, self._device).t())
        self._bounds_known = True

    def move_path(self, row: int, start: int, nodes: Sequence[int]) -> None:
        """Moves a row's slots ``start + node`` to ``start + 1, start + 2, ...`` in path order."""
        moving = [at for at, node in enumerate(nodes, 1) if at != node]
        if not moving:
            return
        first = moving[0]  # the nodes before it are where they belong
        views, slots = self.row(row), [start + node for node in nodes[first - 1 :]]
        sources = {at: to_device(slots, at) for at in {view.device for view in views}}
        for view in views:
            # Selecting copies before it is written, so that source and target may overlap.
            moved = view.index_select(1, sources[view.device])
            view.narrow(1, start + first, len(slots)).copy_(moved)
