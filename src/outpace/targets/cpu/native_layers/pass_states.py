"""The states from which layers go on in a pass, and those that they leave, as `native.cpp` finds
them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outpace.targets.cpu.native_layers.recurrence import Recurrence
from outpace.targets.hf.recurrent.history import StateName
from outpace.targets.hf.recurrent.states import StateCache


class _States(ctypes.Structure):
    """`States` of `recurrence.h`, field by field."""

    _fields_ = (("before", ctypes.c_void_p), ("after", ctypes.c_void_p))


class _LayerStates(ctypes.Structure):
    """`LayerStates` of `recurrence.h`, field by field."""

    _fields_ = (("inputs", _States), ("heads", _States))


class StatePointersStruct(ctypes.Structure):
    """`StatePointers` of `recurrence.h`, field by field."""

    _fields_ = (("parents", ctypes.c_void_p), ("layers", ctypes.c_void_p))


NO_STATE_POINTERS = StatePointersStruct()
"""For layers that keep no state."""
POINTER = ctypes.sizeof(ctypes.c_void_p)
KINDS = ("conv", "recurrent")
"""The states of a layer, by the fields of `_LayerStates`."""


class PassStates:
    """The states from which layers go on in a pass over A rows of T columns, and those that they
    make, which the cache keeps."""

    def __init__(
        self, cache: StateCache, recurrences: Sequence[Recurrence | None], columns: int
    ) -> None:
        """recurrences: of the layers; None where one keeps no state in this pass."""
        progress = cache.progress
        assert progress is not None
        rows = len(progress.starts)
        self._rows, self._columns, self._count = rows, columns, len(recurrences)
        self._parents: Tensor | None = None
        if not isinstance(progress.parents, range):
            by_column = [[own] * rows if isinstance(own, int) else own for own in progress.parents]
            self._parents = torch.tensor(by_column).t().contiguous()  # [A, T]
        wanted = range(max(progress.num_committed - 1, 0), columns)
        self._alive: list[Any] = []
        pointers: list[int | None] = []
        self._places: list[int | None] = []  # in the pointers, by layer and kind
        for recurrence in recurrences:
            shapes = {} if recurrence is None else recurrence.states
            for kind in KINDS:
                if recurrence is None or kind not in shapes:
                    self._places.append(None)
                    continue
                self._places.append(len(pointers))
                name = StateName(recurrence.module.layer_idx, kind, 0)
                before, made = cache.states_before_and_after(name, shapes[kind], wanted)
                self._alive.append(before)
                pointers += [state.data_ptr() for state in before]
                for states in made:
                    pointers += [None] * wanted.start
                    pointers += [state.data_ptr() for state in states]
        self._pointers = (ctypes.c_void_p * len(pointers))(*pointers)

    def of_rows(self, first: int) -> StatePointersStruct:
        """Returns them as the library reads them, for the rows of the pass from ``first`` on. Valid
        as long as this object and what is returned live."""
        begin = ctypes.addressof(self._pointers)

        def states(place: int | None) -> _States:
            if place is None:
                return _States(None, None)
            after = place + self._rows + first * self._columns
            return _States(begin + (place + first) * POINTER, begin + after * POINTER)

        pairs = zip(self._places[::2], self._places[1::2], strict=True)
        layers = (_LayerStates * self._count)(
            *(_LayerStates(states(inputs), states(heads)) for inputs, heads in pairs)
        )
        parents = None if self._parents is None else self._parents[first:].data_ptr()
        found = StatePointersStruct(parents, ctypes.addressof(layers))
        self._alive.append(layers)
        return found
