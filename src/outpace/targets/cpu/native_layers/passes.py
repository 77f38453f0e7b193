"""Passes through layers of our own: what they are given, and how `native.cpp` reads it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outpace.targets.cpu.native import LINE
from outpace.targets.cpu.native_layers.rotary import Angles
from outpace.targets.hf.slots.cache import SlotCache
from outpace.targets.hf.slots.placement import PassSlots

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
