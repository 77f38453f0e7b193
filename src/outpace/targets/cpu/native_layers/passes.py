"""Passes through layers of our own: what they are given, and how our own code reads it."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, arange

from outpace.targets.cpu.weights.weight import LINE
from outpace.targets.hf.cache import SlotCache
from outpace.targets.hf.slot_ranges import PassSlots

STATIC = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds whose angles depend on nothing but the position."""


class Angles(NamedTuple):
    """``cosines`` and ``sines``: ``[P, D]`` by position, with each token's ``positions``
    ``[A, T]``; or ``[A, T, D]`` by token, without."""

    cosines: Tensor
    sines: Tensor
    positions: Tensor | None = None

    @classmethod
    def of(cls, made: Any) -> Angles:
        """Returns what a model has made of the positions of its tokens: cosines and sines, or both
        in complex numbers, of which there is one for two numbers of a head (DeepSeek V2)."""
        if not isinstance(made, Tensor):
            return cls(*made)
        return cls(*(torch.cat([part, part], -1) for part in (made.real, made.imag)))

    def of_rows(self, rows: slice) -> Angles:
        """Returns those of some rows."""
        if self.positions is None:
            return Angles(self.cosines[rows], self.sines[rows])
        return Angles(self.cosines, self.sines, self.positions[rows])


class RotaryTable:
    """The angles of a model, worked out once where that is possible."""

    def __init__(self, module: Any, kind: str | None = None) -> None:
        """module: transformers' own. kind: the type of layers that these angles are for, where it
        has others for each type."""
        self._module = module
        self._kind = kind
        self._table: tuple[Tensor, Tensor, Tensor] | None = None  # the last: what it came from

    def __getstate__(self) -> dict[str, Any]:
        """Returns what copies and pickles hold: the table is worked out anew."""
        return {**self.__dict__, "_table": None}

    def __call__(self, x: Tensor, positions: Tensor, reach: int) -> Angles:
        """x: of the dtype and device asked for; positions: ``[A, T]``, all below ``reach``."""
        module, kind = self._module, self._kind
        more, rope = ([], getattr(module, "rope_type", None))
        if kind is not None:
            more, rope = [kind], module.rope_type.get(kind)
        if rope not in STATIC:
            return Angles.of(module(x, positions, *more))
        source = getattr(module, "inv_freq" if kind is None else f"{kind}_inv_freq")
        table = self._table
        if table is None or table[2] is not source or len(table[0]) < reach:
            cosines, sines, _ = Angles.of(module(x, arange(reach, device=x.device)[None], *more))
            table = self._table = cosines[0].contiguous(), sines[0].contiguous(), source
        return Angles(table[0], table[1], positions)


def rotaries_of(module: Any, kinds: Collection[str]) -> list[RotaryTable]:
    """Returns the angles of a model whose layers are of some types: one for each type, or one that
    all share."""
    if kinds and isinstance(getattr(module, "rope_type", None), dict):
        return [RotaryTable(module, kind) for kind in kinds]
    return [RotaryTable(module)]


def seen_by(mask: Any) -> Tensor | None:
    """Returns a mask ``[A, 1, T, S]`` as booleans. One of numbers is added to scores, and is 0
    where a slot is seen."""
    if mask is None or mask.dtype == torch.bool:
        return mask  # type: ignore[no-any-return]
    seen: Tensor = mask == 0
    return seen


MANY = 2048
"""Tokens that are computed at once, at most, unless one row has more: what the layers work in grows
with them. A larger pass is computed some rows after others."""


class PassInputs(NamedTuple):
    """What layers are given of a pass over A rows of T tokens, and where their outputs go."""

    x: Tensor
    """float32 ``[A, T, hidden]``, contiguous: replaced by the output of the last layer."""
    angles: tuple[Angles, ...]
    """By the numbers of layers' descriptions."""
    cache: SlotCache
    slots: PassSlots
    """The slots of these rows in the cache."""
    masks: tuple[Tensor | None, ...]
    """By the numbers of layers' descriptions: bool ``[A, 1, T, S]``; None where all is seen, or all
    up to the token itself."""
    embeddings: Tensor | None = None
    """float32 ``[A, T, hidden]``, contiguous, for layers that read them; None: there are none."""
    states: Tensor | None = None
    """``[layers, A, T, hidden]``: the output of each layer is written there, that of the last one
    through the norm."""

    def of_rows(self, rows: slice) -> PassInputs:
        """Returns those of consecutive ones of the rows."""
        states, count = self.states, len(self.x)
        return PassInputs(
            x=self.x[rows],
            angles=tuple(angles.of_rows(rows) for angles in self.angles),
            cache=self.cache,
            slots=self.slots.of_rows(rows),
            masks=tuple(
                None if mask is None else mask.expand(count, -1, -1, -1)[rows]
                for mask in self.masks
            ),
            embeddings=None if self.embeddings is None else self.embeddings[rows],
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


class _Angles(ctypes.Structure):
    """`Angles` of `layer.h`, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("cosines", "sines", "positions")),
        ("dim", ctypes.c_int64),
    )


class _Mask(ctypes.Structure):
    """`Mask` of `layer.h`, field by field."""

    _fields_ = (
        ("seen", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("column_stride", ctypes.c_int64),
    )


class _Pass(ctypes.Structure):
    """`Pass` of `layer.h`, field by field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "columns", "view")),
        *((name, ctypes.c_void_p) for name in ("angles", "masks", "firsts", "starts")),
        ("slots", ctypes.c_int64),
        ("embeddings", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class PassDescription:
    """A pass, as the library reads it."""

    struct: _Pass
    source: tuple[Any, ...]  # the objects that it was made of
    numbers: tuple[int, int]  # and the numbers
    alive: tuple[Any, ...]  # what it points to


class PassDescriptions:
    """The current pass as the library reads it: the same for most layers of a model."""

    def __init__(self) -> None:
        # Replaced as a whole, for the sake of other threads.
        self._last: PassDescription | None = None

    def of(self, given: PassInputs, cached: int, scratch: int) -> PassDescription:
        """Returns the description of a pass.

        cached: slots of each head in the cache; scratch: floats that the layers need to work in.
        """
        last, numbers = self._last, (cached, scratch)
        if last is not None and last.numbers == numbers and _same(last.source, _source(given)):
            return last
        self._last = made = _describe_pass(given, cached, scratch)
        return made


def _source(given: PassInputs) -> tuple[Any, ...]:
    return given.slots, given.embeddings, *given.masks, *chain.from_iterable(given.angles)


def _same(old: Sequence[Any], new: Sequence[Any]) -> bool:
    return len(old) == len(new) and all(map(is_, old, new))


def _describe_pass(given: PassInputs, cached: int, scratch: int) -> PassDescription:
    slots, rows, columns = given.slots, given.slots.rows, given.slots.columns
    angles = [Angles(*(None if t is None else t.contiguous() for t in a)) for a in given.angles]  # type: ignore[arg-type]
    masks = [_in_memory(mask, rows, columns) for mask in given.masks]
    tables = (_Angles * len(angles))(*map(_angles, angles))
    seen = (_Mask * len(masks))(*map(_mask, masks))
    room = given.x.new_empty(scratch + LINE)
    struct = _Pass(
        *(rows, columns, slots.view, ctypes.addressof(tables), ctypes.addressof(seen)),
        *(slots.placement.firsts.data_ptr(), slots.starts.data_ptr()),
        *(cached, None if given.embeddings is None else given.embeddings.data_ptr()),
        room.data_ptr(),
    )
    alive = (tables, seen, angles, masks, room)
    return PassDescription(struct, _source(given), (cached, scratch), alive)


def _in_memory(mask: Tensor | None, rows: int, columns: int) -> Tensor | None:
    """Returns a mask as the library reads it."""
    if mask is None and columns > 1:  # a prompt, which follows nothing: plainly causal
        return torch.ones(columns, columns, dtype=torch.bool).tril().expand(rows, 1, -1, -1)
    return mask if mask is None or mask.stride(-1) == 1 else mask.contiguous()


def _angles(angles: Angles) -> _Angles:
    positions = None if angles.positions is None else angles.positions.data_ptr()
    size = angles.cosines.shape[-1]
    return _Angles(angles.cosines.data_ptr(), angles.sines.data_ptr(), positions, size)


def _mask(mask: Tensor | None) -> _Mask:
    if mask is None:
        return _Mask(None, 0, 0)
    return _Mask(mask.data_ptr(), mask.stride(0), mask.stride(2))
