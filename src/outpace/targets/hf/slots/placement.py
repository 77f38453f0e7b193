"""Where the rows of a pass lie in the cache's buffers, and the slots that the pass uses there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from outpace.targets.hf.slots.extents import Extent


@dataclass(frozen=True)
class Spacing:
    """Rows at equal distances: row a begins at slot ``first + a * distance``."""

    first: int
    distance: int


def spacing_of(extents: Sequence[Extent]) -> Spacing | None:
    """Returns how extents are spaced, None where their distances differ."""
    first = extents[0].first
    distance = extents[1].first - first if len(extents) > 1 else 0
    even = all(extent.first == first + a * distance for a, extent in enumerate(extents))
    return Spacing(first, distance) if even and distance >= 0 else None


@dataclass(frozen=True, eq=False)
class Placement:
    """The extents of A consecutive rows."""

    firsts: Tensor  # [A] on the device: the first slot of each row
    lasts: Tensor  # [A] the last slot of each row
    spacing: Spacing | None
    shortest: int  # slots that every one of the rows has

    def of_rows(self, rows: slice) -> Placement:
        """Returns the extents of consecutive ones of the rows."""
        spacing = self.spacing
        if spacing is not None:
            spacing = Spacing(spacing.first + rows.start * spacing.distance, spacing.distance)
        return Placement(self.firsts[rows], self.lasts[rows], spacing, self.shortest)

    def spaced(self, view: int) -> Spacing | None:
        """Returns how the rows are spaced, if attention can see ``view`` slots of each of them in
        place: None where it would look at slots of other rows."""
        return self.spacing if view <= self.shortest else None


@dataclass(frozen=True, eq=False)
class PassSlots:
    """The slots of one pass: row a writes at ``starts[a], starts[a] + 1, ...`` of its own extent,
    and sees the first ``view`` slots of that extent, but for those that the mask hides."""

    placement: Placement
    starts: Tensor  # [A] on the device: how many slots of each row are committed
    uniform_start: int | None  # the start of every row, if they agree
    columns: int  # T
    view: int

    @property
    def rows(self) -> int:
        """A."""
        return self.starts.shape[0]

    def of_rows(self, rows: slice) -> PassSlots:
        """Returns the slots of consecutive ones of the rows."""
        placement, starts = self.placement.of_rows(rows), self.starts[rows]
        return replace(self, placement=placement, starts=starts)

    @cached_property
    def spacing(self) -> Spacing | None:
        """How the rows are spaced, if attention can see them in place."""
        return self.placement.spaced(self.view)

    @cached_property
    def written(self) -> Tensor:
        """The buffers' slots that the columns go to, ``[A * T]``: the same for all layers."""
        columns = torch.arange(self.columns, device=self.starts.device)
        return ((self.placement.firsts + self.starts)[:, None] + columns).flatten()

    @cached_property
    def seen(self) -> Tensor:
        """The buffers' slots that are copied together for attention, ``[A * view]``. Beyond the end
        of a row's extent, where the mask hides all, stands its last slot: never another row's."""
        columns = torch.arange(self.view, device=self.starts.device)
        slots = self.placement.firsts[:, None] + columns
        return torch.minimum(slots, self.placement.lasts[:, None]).flatten()

    def worked_out(self) -> PassSlots:
        """Returns itself with all indices made, which a compiled forward cannot make."""
        _ = self.written
        if self.spacing is None:
            _ = self.seen
        return self
