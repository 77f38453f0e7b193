"""Passes through layers of our own: what they are given, and how `native.cpp` reads it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, arange

from outpace.targets.cpu.native import LINE
from outpace.targets.hf.cache import SlotCache
from outpace.targets.hf.extents import PassSlots

STATIC = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds whose angles depend on nothing but the position."""


class Angles(NamedTuple):
    """``cosines`` and ``sines``: ``[P, D]`` by position, with each token's ``positions``
    ``[A, T]``; or ``[A, T, D]`` by token, without."""

    cosines: Tensor
    sines: Tensor
    positions: Tensor | None = None

    def of_rows(self, rows: slice) -> Angles:
        """Returns those of some rows."""
        if self.positions is None:
            return Angles(self.cosines[rows], self.sines[rows])
        return Angles(self.cosines, self.sines, self.positions[rows])


class Rotary:
    """The angles of a model, worked out once where that is possible."""

    def __init__(self, module: Any) -> None:
        """module: transformers' own."""
        self._module = module
        self._table: tuple[Tensor, Tensor, Tensor] | None = None  # the last: what it came from

    def __getstate__(self) -> dict[str, Any]:
        """Returns what copies and pickles hold: the table is worked out anew."""
        return {**self.__dict__, "_table": None}

    def __call__(self, x: Tensor, positions: Tensor, reach: int) -> Angles:
        """x: of the dtype and device asked for; positions: ``[A, T]``, all below ``reach``."""
        if getattr(self._module, "rope_type", None) not in STATIC:
            return Angles(*self._module(x, positions))
        source, table = self._module.inv_freq, self._table
        if table is None or table[2] is not source or len(table[0]) < reach:
            cosines, sines = self._module(x, arange(reach, device=x.device)[None])
            table = self._table = cosines[0].contiguous(), sines[0].contiguous(), source
        return Angles(table[0], table[1], positions)


MANY = 2048
"""Tokens that are computed at once, at most, unless one row has more: what the layers work in grows
with them. A larger pass is computed some rows after others."""


class PassInputs(NamedTuple):
    """What layers are given of a pass over A rows of T tokens, and where their outputs go."""

    x: Tensor
    """float32 ``[A, T, hidden]``, contiguous: replaced by the output of the last layer."""
    angles: Angles
    cache: SlotCache
    slots: PassSlots
    """The slots of these rows in the cache."""
    mask: Tensor | None
    """bool ``[A, 1, T, S]``; None where all is seen, or all up to the token itself."""
    states: Tensor | None = None
    """``[layers, A, T, hidden]``: the output of each layer is written there, that of the last one
    through the norm."""

    def of_rows(self, rows: slice) -> PassInputs:
        """Returns those of consecutive ones of the rows."""
        mask, states = self.mask, self.states
        return PassInputs(
            x=self.x[rows],
            angles=self.angles.of_rows(rows),
            cache=self.cache,
            slots=self.slots.of_rows(rows),
            mask=None if mask is None else mask.expand(len(self.x), -1, -1, -1)[rows],
            states=None if states is None else states[:, rows],
        )

    def in_parts(self) -> Iterator[tuple[slice, PassInputs]]:
        """Yields the pass in parts of whole rows, each of `MANY` tokens at most if it can be, and
        which rows these are."""
        rows, columns = self.x.shape[:2]
        if rows * columns <= MANY:
            yield slice(0, rows), self
            return
        size = max(1, MANY // columns)
        for first in range(0, rows, size):
            some = slice(first, first + size)
            yield some, self.of_rows(some)


class _Pass(ctypes.Structure):
    """`Pass` of `native.cpp`, field by field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "columns", "view", "rotary")),
        *((name, ctypes.c_void_p) for name in ("cosines", "sines", "positions")),
        *((name, ctypes.c_void_p) for name in ("firsts", "starts", "mask")),
        *((name, ctypes.c_int64) for name in ("mask_row", "mask_column", "cache_head")),
        ("scratch", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class PassDescription:
    """A pass, as the library reads it."""

    struct: _Pass
    source: tuple[Any, ...]  # the objects that it was made of
    numbers: tuple[int, int]  # and the numbers
    alive: tuple[Tensor | None, ...]  # the tensors that it points to


class PassDescriptions:
    """The current pass as the library reads it: the same for most layers of a model."""

    def __init__(self) -> None:
        # Replaced as a whole, for the sake of other threads.
        self._last: PassDescription | None = None

    def of(self, given: PassInputs, head_stride: int, scratch: int) -> PassDescription:
        """Returns the description of a pass.

        head_stride: floats between two heads in the cache; scratch: floats that the layers
        need to work in.
        """
        last, numbers = self._last, (head_stride, scratch)
        if last is not None and last.numbers == numbers and _same(last.source, _source(given)):
            return last
        self._last = _describe_pass(given, head_stride, scratch)
        return self._last


def _source(given: PassInputs) -> tuple[Any, ...]:
    return given.slots, given.mask, *given.angles


def _same(old: Sequence[Any], new: Sequence[Any]) -> bool:
    return all(one is other for one, other in zip(old, new, strict=True))


def _describe_pass(given: PassInputs, head_stride: int, scratch: int) -> PassDescription:
    slots, angles, mask = given.slots, given.angles, given.mask
    cosines, sines = angles.cosines.contiguous(), angles.sines.contiguous()
    positions = None if angles.positions is None else angles.positions.contiguous()
    rows, columns = slots.rows, slots.columns
    if mask is None and columns > 1:  # a prompt, which follows nothing: plainly causal
        mask = torch.ones(columns, columns, dtype=torch.bool).tril().expand(rows, 1, -1, -1)
    if mask is not None and mask.stride(-1) != 1:
        mask = mask.contiguous()
    room = cosines.new_empty(scratch + LINE)
    struct = _Pass(
        *(rows, columns, slots.view, cosines.shape[-1]),
        *(cosines.data_ptr(), sines.data_ptr()),
        None if positions is None else positions.data_ptr(),
        *(slots.placement.firsts.data_ptr(), slots.starts.data_ptr()),
        *((None, 0, 0) if mask is None else (mask.data_ptr(), mask.stride(0), mask.stride(2))),
        *(head_stride, room.data_ptr()),
    )
    numbers, alive = (head_stride, scratch), (cosines, sines, positions, mask, room)
    return PassDescription(struct, _source(given), numbers, alive)
