"""The history of a state of all rows: after the columns of a pass, and after earlier tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.core.trees.tree import Tree

Columns = Sequence[int | Sequence[int]]
"""For each column of a pass the one whose state it starts from: a number for all rows, or one for
each row. -1 stands for the state from before the pass."""


class StateName(NamedTuple):
    """One of the states of a model."""

    layer: int
    kind: str
    """"conv": the last inputs of a convolution or a shift. "recurrent": all else."""
    number: int
    """Among those of the same kind in the layer."""


class RowState(NamedTuple):
    """A state of one row: a row of what a pass has left, which stays as it is."""

    states: Tensor  # [A, ...]
    row: int


@dataclass(eq=False)
class PassProgress:
    """How far a pass over A rows has come."""

    first: int
    """The cache's row that is the first of the pass."""
    starts: Sequence[int]
    parents: Columns
    num_committed: int
    """How many columns are committed, whatever the verdict: states within them are not kept."""
    begin: int = 0
    """The first of the columns that are read at once now."""
    end: int = 0
    """The column after the last of them."""

    @property
    def last(self) -> int:
        """The column whose state is made now."""
        return self.end - 1


def parents_of(columns: int, tree: Tree | None) -> Columns:
    """Returns, for each column of a pass, the one whose token stands before its own."""
    if tree is None or tree.is_chain:
        return range(-1, columns - 1)
    root = columns - tree.size - 1
    parents = [[root + parent for parent in row] for row in tree.parents.tolist()]
    nodes = [row[0] if len(set(row)) == 1 else row for row in zip(*parents, strict=True)]
    return [*range(-1, root), *nodes]


@dataclass(eq=False)
class StateHistory:
    """One state of all rows, after the slots at which it was kept."""

    rows: list[dict[int, RowState]]
    made: dict[int, Tensor] = field(default_factory=dict)
    """What the current pass has made, ``[A, ...]`` by column."""

    def current(self, progress: PassProgress, empty: Tensor | None = None) -> Tensor | None:
        """Returns the state ``[A, ...]`` that the columns read now go on from, as a copy that the
        layer may change; None where no row has one. empty: see `StateCache.state`."""
        if progress.last not in self.made:
            before = self._before(progress, empty)
            if before is None:
                return None
            self.made[progress.last] = before
        return self.made[progress.last]

    def at_start(self, progress: PassProgress, empty: Tensor | None) -> Tensor | None:
        """Returns a copy of the state ``[A, ...]`` that the rows had before the pass."""
        rows = range(len(progress.starts))
        return _together([self._at_start(progress, row) for row in rows], empty)

    def _before(self, progress: PassProgress, empty: Tensor | None) -> Tensor | None:
        parent = progress.parents[progress.begin]
        if isinstance(parent, int) and parent >= 0:
            return self.made[parent].clone()
        if isinstance(parent, int):
            return self.at_start(progress, empty)
        kept = [
            self._at_start(progress, row)
            if parent[row] < 0
            else RowState(self.made[parent[row]], row)
            for row in range(len(progress.starts))
        ]
        return _together(kept, empty)

    def _at_start(self, progress: PassProgress, row: int) -> RowState | None:
        start = progress.starts[row]
        return self.rows[progress.first + row][start - 1] if start else None

    def keep(self, progress: PassProgress) -> None:
        """Puts what a pass has made where it belongs. What stood after the rows is forgotten."""
        if not self.made:
            return
        for row, start in enumerate(progress.starts):
            kept = self.rows[progress.first + row]
            for slot in [slot for slot in kept if slot >= start]:
                del kept[slot]
            kept.update({start + column: RowState(made, row) for column, made in self.made.items()})
        self.made = {}

    def gather(self, lengths: Sequence[int]) -> None:
        """Puts the states at which the rows go on into one tensor, if they are spread over several
        that hold more: each of these is kept for as long as one row needs it."""
        kept = [row.get(length - 1) for row, length in zip(self.rows, lengths, strict=True)]
        held = {id(state.states): len(state.states) for state in kept if state is not None}
        if len(held) < 2 or max(held.values()) == 1:
            return
        together = _together(kept, None)
        assert together is not None
        for number, (state, length) in enumerate(zip(kept, lengths, strict=True)):
            if state is not None:
                self.rows[number][length - 1] = RowState(together, number)


def _together(kept: Sequence[RowState | None], empty: Tensor | None) -> Tensor | None:
    """Returns states ``[A, ...]`` as one tensor of their own; a row without one begins with
    ``empty`` ``[1, ...]``, or at 0."""
    known = [state for state in kept if state is not None]
    if not known:
        return None if empty is None else torch.cat([empty] * len(kept))
    states = known[0].states
    if len(states) == len(kept) and all(
        state is not None and state.states is states and state.row == row
        for row, state in enumerate(kept)
    ):
        return states.clone()
    begun = torch.zeros_like(states[0]) if empty is None else empty[0]
    return torch.stack([begun if state is None else state.states[state.row] for state in kept])
