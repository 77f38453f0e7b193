"""KV caches of heads: the entries that a head attends over, and those of its prefix layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outpace.core.transfer import to_device
from outpace.heads.decoder import DecoderLayer
from outpace.heads.layers import AttentionContext, KeyValues
from outpace.heads.native import NativeLayers, SlotAttentionContext, WrittenKeyValues
from outpace.targets.hf.cache import SlotCache
from outpace.targets.hf.prefixes import SavedPrefix
from outpace.targets.hf.slot_layer import seen
from outpace.targets.hf.slot_ranges import SLOT_GRANULARITY, PassSlots, Placement


class KVCacheOwner(Protocol):
    """A head that keeps entries of texts."""

    def begin(self, rows: int) -> KeyValues:
        """Returns no entries of ``rows`` rows."""


class HeadKVCache:
    """Keys and values by row, in slots like those of a target: each text takes memory for itself.

    Rows are numbered from 0. Entries after a row's length are left over from other texts, and
    nobody attends to them.
    """

    def __init__(self, head: KVCacheOwner, rows: int, ahead: int = 0) -> None:
        """rows: how many there may be. ahead: how many tokens after its own an entry follows from,
        too."""
        self._none, self._ahead = head.begin(1), ahead
        self._slots = SlotCache(rows, self._none.keys.device)
        self.lengths: list[int] = []
        self._begin()
        self.native: NativeLayers | None = None
        """What computes the head's layers in these slots; None: torch does, and `append` puts their
        entries there."""

    def _begin(self) -> None:
        self._layer: Any = self._slots.layers[0]
        self._layer.lazy_initialization(self._none.keys, self._none.values)

    def reset(self) -> None:
        """Forgets all rows, whatever state an interruption has left."""
        self._slots.reset()
        self.lengths = []
        self._begin()

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

    def restorable_length(self, row: int, length: int) -> int:
        """Returns how many of a row's first ``length`` tokens its entries follow from."""
        return min(length, self.lengths[row] + self._ahead)

    def save(self, row: int, length: int) -> SavedPrefix:
        """Returns copies of the entries that follow from the first ``length`` tokens of a row."""
        return replace(self._slots.saved(row, length - self._ahead), ahead=self._ahead)

    def restore(self, row: int, saved: SavedPrefix, length: int) -> None:
        """Gives the first ``length`` entries that were saved to a row that has none."""
        self._slots.restore(row, saved, length)
        self.lengths[row] = length

    def of(self, rows: Sequence[int]) -> tuple[KeyValues, Tensor]:
        """Returns the entries of some rows, as many as the longest has, and which of them are a
        row's own, ``[B, L]`` bool. They may be views, which the next `append` writes over."""
        lengths = [self.lengths[row] for row in rows]
        longest, device = max(lengths), self._none.keys.device
        own = torch.arange(longest, device=device) < to_device(lengths, device)[:, None]
        return self._entries(list(rows), longest), own

    def next_of(self, rows: Sequence[int], counts: Sequence[int]) -> AttentionContext:
        """Returns the context of the next entries of some rows, as many of each as the most of
        ``counts``: each sees those of its own row that come before it, and itself. counts: how many
        of them a row will keep."""
        count = max(counts)
        device, lengths = self._none.keys.device, [self.lengths[row] for row in rows]
        columns = torch.arange(count, device=device)
        causal = (columns <= columns[:, None]).expand(len(rows), -1, -1)
        positions = to_device(lengths, device)[:, None] + columns
        # A pass of our own takes slots for all entries, also for those that are not kept.
        even = count - min(counts) <= SLOT_GRANULARITY
        if self.native is not None and even and self.native.takes(len(rows) * count):
            return self.in_slots(rows, lengths, positions, causal)
        before, own = self.of(rows)
        visible = torch.cat([own[:, None].expand(-1, count, -1), causal], -1)
        return AttentionContext(positions, before, visible)

    def drafts_of(self, rows: Sequence[int]) -> DraftEntries:
        """Returns what will be drafted after some rows."""
        if self.native is None or not self.native.takes(len(rows)):
            return TensorDraftCache(self, rows)
        return SlotDraftCache(self, rows)

    def in_slots(
        self, rows: Sequence[int], lengths: Sequence[int], positions: Tensor, related: Tensor
    ) -> SlotAttentionContext:
        """Returns the context of entries that a pass of `native` writes into slots.

        lengths: of the texts before them. positions: ``[B, W]``. related: ``[B, W, F + W]``,
        which of the F entries that were written after the text, and of the W themselves, each sees.
        """
        assert self.native is not None
        count, width = related.shape[1:]
        needed, view = list(self.lengths), max(lengths) + width
        for row, length in zip(rows, lengths, strict=True):
            needed[row] = length + width
        self._slots.reserve(0, needed)
        starts = torch.tensor(lengths, device="cpu") + (width - count)
        return SlotAttentionContext(
            positions=positions,
            before=self._nothing_of(len(rows)),
            visible=_by_slot(lengths, related, view),
            native=self.native,
            cache=self._slots,
            slots=PassSlots(self._placement(rows), starts, None, count, view),
        )

    def _placement(self, rows: Sequence[int]) -> Placement:
        """Where the slots of some rows are."""
        if list(rows) == list(range(rows[0], rows[0] + len(rows))):
            return self._slots.placement(rows[0], len(rows))
        each = [self._slots.placement(row, 1) for row in rows]
        return Placement(
            firsts=torch.cat([one.firsts for one in each]),
            lasts=torch.cat([one.lasts for one in each]),
            spacing=None,
            shortest=min(one.shortest for one in each),
        )

    @torch.inference_mode()
    def append(self, rows: Sequence[int], more: KeyValues, counts: Sequence[int]) -> None:
        """Adds the first ``counts`` entries of ``more`` to each of the rows."""
        needed = list(self.lengths)
        for row, count in zip(rows, counts, strict=True):
            needed[row] += count
        if isinstance(more, WrittenKeyValues):
            self.lengths = needed
            return
        self._slots.reserve(0, needed)
        for at, (row, count) in enumerate(zip(rows, counts, strict=True)):
            begin = self.lengths[row]
            for slots, new in zip(self._slots.row(row), (more.keys, more.values), strict=True):
                slots[:, begin : begin + count] = new[at, :, :count]
        self.lengths = needed

    def drop(self, row: int, count: int) -> None:
        """Takes the last ``count`` entries of a row away."""
        self.lengths[row] -= count

    def _entries(self, rows: list[int], count: int) -> KeyValues:
        """The first ``count`` slots of some rows."""
        if not count:
            return self._nothing_of(len(rows))
        placement = self._placement(rows)
        starts = to_device([self.lengths[row] for row in rows], self._none.keys.device)
        slots = PassSlots(placement, starts, None, columns=0, view=count)
        return KeyValues(seen(self._layer.keys, slots), seen(self._layer.values, slots))

    def _nothing_of(self, rows: int) -> KeyValues:
        """No entries of this many rows."""
        keys, values = self._none.keys, self._none.values
        return KeyValues(keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1))


def _by_slot(lengths: Sequence[int], related: Tensor, view: int) -> Tensor:
    """Which slots entries see, bool ``[B, W, view]``: all of their texts, and those after these
    that ``related`` says."""
    rows, count, width = related.shape
    if min(lengths) == max(lengths):
        return torch.cat([related.new_ones(rows, count, lengths[0]), related], -1)
    after = torch.arange(view, device="cpu") - torch.tensor(lengths, device="cpu")[:, None]
    at = after.clamp(0, width - 1)[:, None].expand(-1, count, -1)
    text, drafted = (after < 0)[:, None], (after < width)[:, None]
    return text | (related.gather(2, at) & drafted)


class DraftEntries(Protocol):
    """Entries after the texts of some rows, in one draft."""

    positions: Tensor
    """``[B, 1]``, of the next ones."""

    def attn_context(self, related: Tensor) -> AttentionContext:
        """Returns the context of the next W entries of each row. related: ``[B, W, F + W]``, which
        of those that were drafted before, and of these, each of them sees besides its text."""

    def add(self, entries: KeyValues) -> None:
        """Takes the entries that were computed in this context."""


class TensorDraftCache:
    """Drafts next to the texts' entries, as tensors."""

    def __init__(self, cache: HeadKVCache, rows: Sequence[int]) -> None:
        self.entries, self.own = cache.of(rows)
        """Those before the next ones, and which of the text's are a row's own, bool ``[B, L]``."""
        lengths = [[cache.lengths[row]] for row in rows]
        self.positions = to_device(lengths, self.own.device)

    def attn_context(self, related: Tensor) -> AttentionContext:
        width = related.shape[1]
        visible = torch.cat([self.own[:, None].expand(-1, width, -1), related], -1)
        return AttentionContext(self.positions.expand(-1, width), self.entries, visible)

    def add(self, entries: KeyValues) -> None:
        self.entries = self.entries.then(entries)
        self.positions = self.positions + 1


class SlotDraftCache:
    """Drafts in the slots after the texts, which nobody else uses until the draft is over."""

    def __init__(self, cache: HeadKVCache, rows: Sequence[int]) -> None:
        self._cache, self._rows = cache, rows
        self._lengths = [cache.lengths[row] for row in rows]
        self.positions = torch.tensor(self._lengths, device="cpu")[:, None]

    def attn_context(self, related: Tensor) -> AttentionContext:
        positions = self.positions.expand(-1, related.shape[1])
        return self._cache.in_slots(self._rows, self._lengths, positions, related)

    def add(self, entries: KeyValues) -> None:
        self.positions = self.positions + 1


MAX_UNCOMPUTED = 32
"""States or entries of a row that wait until they are asked for, at most: more are computed as
they come."""


class PrefixLayerCache(HeadKVCache):
    """The texts of some rows, numbered from 0, as a prefix layer has read them.

    States that come with a round wait for the next draft of the head: another drafter may have the
    next rounds, and one pass over several states reads the layer's weights once.
    """

    def __init__(self, layer: DecoderLayer, rows: int) -> None:
        """rows: how many there may be."""
        super().__init__(layer, rows)
        self._read = layer
        self._waiting: list[list[Tensor]] = []  # of each row, [T, H] each

    def admit(self, source: int | None = None, length: int = 0) -> None:
        super().admit(source, length)
        self._waiting.append([])

    def reset(self) -> None:
        super().reset()
        self._waiting = []

    def retain(self, rows: Sequence[int]) -> None:
        super().retain(rows)
        self._waiting = [self._waiting[row] for row in rows]

    def add(self, row: int, states: Tensor) -> None:
        """Takes the states ``[T, H]`` that come next in a row."""
        if len(states):
            self._waiting[row].append(states.clone())  # a view would keep those of the whole pass

    def waiting(self, row: int) -> int:
        """Returns how many states of a row wait."""
        return sum(map(len, self._waiting[row]))

    @torch.inference_mode()
    def latest(self, rows: Sequence[int]) -> Tensor:
        """Reads what waits in some rows, something in each; returns what the layer makes of the
        last state of each, ``[B, H]``."""
        states = [torch.cat(self._waiting[row]) for row in rows]
        counts = [len(each) for each in states]
        attn_context = self.next_of(rows, counts)
        found, entries = attn_context.through([self._read], pad_sequence(states, batch_first=True))
        self.append(rows, entries, counts)
        for row in rows:
            self._waiting[row].clear()
        return torch.stack([each[count - 1] for each, count in zip(found, counts, strict=True)])
