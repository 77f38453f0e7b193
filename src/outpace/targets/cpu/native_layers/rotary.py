"""Cosines and sines of positions, as rotary attention turns its heads by them."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, arange

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
