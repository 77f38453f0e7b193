"""States of recurrent and linear-attention layers, next to the slots of the others.

What such a layer remembers of a text has one size, however long the text is, and nothing can be
taken out of it again. So the state after every column of a pass is kept until it is known how far
the row has come. A state is named by the slot of the last token that it has read:

    slots   | 0 ....... length - 1 | length, length + 1, ...  (pending, then nodes)
    states  |           one here   | one for each column

A pass that begins at ``length`` goes on from the state of slot ``length - 1``, a column from that
of its parent. So the lengths of the rows stay the only truth: what is not accepted is overwritten,
and an accepted path moves to the front, as in `SlotCache`. A kept state is never changed: rows that
fork and texts that are saved share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from outpace.targets.base import KVCacheDtype
from outpace.targets.hf.cache import SlotCache
from outpace.targets.hf.prefixes import SavedPrefix
from outpace.targets.hf.recurrent.history import PassProgress, RowState, StateHistory, StateName
from outpace.targets.hf.slot_layer import SlotLayer


class StateWriteBlocked(Exception):
    """A layer was about to change a state that it was not to touch."""


SavedStates = Mapping[int, Mapping[StateName, Tensor]]
"""Saved states of a row, by slot."""


class _Asked:
    """The states of one kind in a layer, each of which is asked for when it is looked up."""

    def __init__(self, cache: StateCache, layer: int, kind: str) -> None:
        self._cache, self._layer, self._kind = cache, layer, kind

    def __getitem__(self, number: int) -> Tensor | None:
        return self._cache.state(StateName(self._layer, self._kind, number))


class StateLayer(SlotLayer):  # type: ignore[no-untyped-call]
    """A layer that may have states as well as slots. Models of transformers before 5.20 look up
    their states here; later ones ask the cache."""

    record_past = False  # what is kept is kept in the cache

    def __init__(self, owner: StateCache, index: int) -> None:
        super().__init__(owner)
        known: StateCache = self._owner  # type: ignore[assignment]
        self.conv_states = _Asked(known, index, "conv")
        self.recurrent_states = _Asked(known, index, "recurrent")


class StateCache(SlotCache):
    """A slot cache for a model with states, and what transformers' layers ask it for."""

    def __init__(
        self, rows: int, device: torch.device | str = "cpu", kv_cache_dtype: KVCacheDtype = "auto"
    ) -> None:
        super().__init__(rows, device, kv_cache_dtype)
        self.progress: PassProgress | None = None
        self.listener: Callable[[StateName, bool], None] | None = None
        """Called with the state that is asked for, and whether it is about to be changed."""
        self._may_change = True
        self._histories: dict[StateName, StateHistory] = {}
        self._pinned: list[int | None] = []  # by row: a slot whose states are not dropped

    # -- what transformers asks for --------------------------------------------------------------

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.state(StateName(layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.state(StateName(layer_idx, "recurrent", state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Takes the inputs ``[A, C, T]`` of a convolution; returns them after as many earlier ones
        as it looks back."""
        name = StateName(layer_idx, "conv", state_idx)
        before = self.state(name, changes=True)
        if before is None:
            size = conv_kernel_size or conv_states.shape[-1]
            seen = pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        else:
            size = before.shape[-1]
            seen = torch.cat([before, conv_states.to(before.dtype)], -1)
        self.set_state(name, seen[..., -size:])
        return seen

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        name = StateName(layer_idx, "recurrent", state_idx)
        before = self.state(name, changes=True)
        new = recurrent_states if before is None else recurrent_states.to(before.dtype)
        return self.set_state(name, new)

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        if self.progress is None or not self._may_change:
            return False
        return max(self.progress.starts) + self.progress.begin > 0

    def is_recording_past(self, layer_idx: int) -> bool:
        return False  # what is kept is kept here

    def new_layer(self, index: int) -> SlotLayer:
        return StateLayer(self, index)

    @contextmanager
    def without_states(self) -> Iterator[None]:
        """Shows no state while the block runs, and raises `StateWriteBlocked` in it before one is
        made."""
        self._may_change = False
        try:
            yield
        finally:
            self._may_change = True

    def state(
        self, name: StateName, changes: bool = False, empty: Tensor | None = None
    ) -> Tensor | None:
        """Returns a state ``[A, ...]`` that the columns read now go on from; a layer that changes
        it in place has thereby made the new one. changes: whether a new one is about to be set.
        empty: ``[1, ...]``, after no token; without it None is returned where no row has any."""
        assert self.progress is not None
        if self.listener is not None:
            self.listener(name, changes)
        if not self._may_change:
            if changes:
                raise StateWriteBlocked
            return None
        return self._history(name).current(self.progress, empty)

    def at_start(self, name: StateName, empty: Tensor) -> Tensor:
        """Returns a copy of a state ``[A, ...]`` that the rows had before the current pass."""
        assert self.progress is not None
        state = self._history(name).at_start(self.progress, empty)
        assert state is not None
        return state

    def states_before_and_after(
        self, name: StateName, shape: Sequence[int], columns: Sequence[int]
    ) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Returns the state of each row ``[*shape]`` before the pass, to be read only, and each
        row's after some columns ``[1, *shape]``, to be filled: for code that computes all columns
        of a layer by itself."""
        assert self.progress is not None
        starts, first = self.progress.starts, self.progress.first
        rows = self._history(name).rows[first : first + len(starts)]
        before, after = [], []
        for kept, start in zip(rows, starts, strict=True):
            if start:
                states, row = kept[start - 1]
                before.append(states[row].contiguous())
            else:
                before.append(torch.zeros(shape, dtype=torch.float32, device=self._device))
            made = [before[-1].new_empty(1, *shape) for _ in columns]
            for slot in [slot for slot in kept if slot >= start]:
                del kept[slot]
            kept.update(
                {start + at: RowState(own, 0) for at, own in zip(columns, made, strict=True)}
            )
            after.append(made)
        return before, after

    def holds(self, name: StateName, shape: Sequence[int]) -> bool:
        """Whether there are states of that name, and all are float32 ``[A, *shape]``."""
        history = self._histories.get(name)
        kept = [] if history is None else [state for row in history.rows for state in row.values()]
        return bool(kept) and all(
            each.states.shape[1:] == tuple(shape) and each.states.dtype == torch.float32
            for each in kept
        )

    def _history(self, name: StateName) -> StateHistory:
        history = self._histories.get(name)
        if history is None:
            history = self._histories[name] = StateHistory([{} for _ in self._ranges])
        return history

    def set_state(self, name: StateName, state: Tensor) -> Tensor:
        """Takes the state ``[A, ...]`` after the columns that are read now."""
        assert self.progress is not None
        # A part of something larger would keep all of it alive.
        alone = state.untyped_storage().nbytes() == state.nbytes
        made = state if alone else state.clone()
        self._histories[name].made[self.progress.last] = made
        return made

    # -- passes ----------------------------------------------------------------------------------

    def begin(self, progress: PassProgress) -> None:
        """Begins a pass."""
        for history in self._histories.values():
            history.made = {}  # of a pass that was interrupted
        self.progress = progress

    def drop_column(self, column: int) -> None:
        """Forgets the states that the current pass has made after a column."""
        for history in self._histories.values():
            history.made.pop(column, None)

    def end(self) -> None:
        """Keeps the states that the current pass has made."""
        assert self.progress is not None
        for history in self._histories.values():
            history.keep(self.progress)
        self.progress = None

    # -- rows ------------------------------------------------------------------------------------

    @property
    def state_bytes(self) -> int:
        """Bytes of the states that are kept."""
        kept = {
            id(state.states): state.states.nbytes
            for history in self._histories.values()
            for row in history.rows
            for state in row.values()
        }
        return sum(kept.values())

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.state_bytes

    def admit(self, count: int) -> None:
        super().admit(count)
        self._pinned += [None] * count
        for history in self._histories.values():
            history.rows += [{} for _ in range(count)]

    def reset(self) -> None:
        super().reset()
        self._histories, self._pinned, self.progress = {}, [], None
        self._may_change = True

    def retain(self, rows: Sequence[int]) -> None:
        super().retain(rows)
        self._pinned = [self._pinned[row] for row in rows]
        for history in self._histories.values():
            history.rows = [history.rows[row] for row in rows]

    def fork(self, source: int, length: int) -> int:
        row = super().fork(source, length)
        for history in self._histories.values():
            kept = history.rows[source]
            history.rows[row] = {length - 1: kept[length - 1]} if length - 1 in kept else {}
        self.keep_checkpoint(row, length)
        return row

    def keep_checkpoint(self, row: int, length: int) -> None:
        """Sees to it that the states of the first ``length`` tokens of a row, once they are there,
        stay as long as the row. After no token there are none."""
        self._pinned[row] = length - 1 if length else None

    def restorable_length(self, row: int, length: int) -> int:
        """Returns the greatest length up to ``length`` at which a row can go on."""
        # A layer that a pass left out has no state there, and cannot go on.
        held = [set(history.rows[row]) for history in self._histories.values()]
        slots = set.intersection(*held) if held else set()
        return max((slot + 1 for slot in slots if slot < length), default=0)

    @torch.inference_mode()
    def drop_checkpoints(self, lengths: Sequence[int], rollback: int) -> None:
        """Drops the states after tokens that the rows do not have, and those that are further back
        than ``rollback`` tokens."""
        for history in self._histories.values():
            for kept, length, pinned in zip(history.rows, lengths, self._pinned, strict=True):
                held = range(length - 1 - rollback, length)
                for slot in [slot for slot in kept if slot not in held and slot != pinned]:
                    del kept[slot]
            if not rollback:
                history.gather(lengths)

    def move_path(self, row: int, start: int, nodes: Sequence[int]) -> None:
        if self.buffers:
            super().move_path(row, start, nodes)
        for history in self._histories.values():
            kept = history.rows[row]
            moved = {start + at: kept.get(start + node) for at, node in enumerate(nodes, 1)}
            kept.update({slot: state for slot, state in moved.items() if state is not None})

    def saved(self, row: int, length: int) -> SavedPrefix:
        return replace(super().saved(row, length), states=self.saved_states(row, length))

    def restore(self, row: int, saved: SavedPrefix, length: int) -> None:
        super().restore(row, saved, length)
        assert saved.states is not None
        self.restore_states(row, saved.states, [length - 1])

    def saved_states(self, row: int, length: int) -> SavedStates:
        """Returns copies of the states of a row after its first tokens, where there are any."""
        slots = [slot for slot in (self._pinned[row], length - 1) if slot is not None]
        return {
            slot: {
                name: history.rows[row][slot].states[history.rows[row][slot].row].clone()
                for name, history in self._histories.items()
            }
            for slot in slots
            if slot < length and self.restorable_length(row, slot + 1) == slot + 1
        }

    def restore_states(self, row: int, saved: SavedStates, slots: Iterable[int]) -> None:
        """Gives a row saved states."""
        for slot in slots:
            for name, state in saved[slot].items():
                self._history(name).rows[row][slot] = RowState(state[None], 0)
