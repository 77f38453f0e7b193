"""Masks of a decoder that counts positions itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from outpace.targets.hf.slots.masks import Layout, MaskMaker


@dataclass(frozen=True, eq=False)
class SelfMask:
    """Which slots the columns of a pass see of their own text, and where those slots stand."""

    mask: Tensor  # [A, 1, T, S]
    slot_positions: Tensor  # [A, S]


class DecoderMasks(MaskMaker):
    """Adds to each mask what only the layout knows: the positions of slots.

    It makes all masks itself: a decoder would count its own columns from the longest row.
    """

    @property
    def has_own(self) -> bool:
        return False

    def __call__(self, layout: Layout) -> Any:
        return SelfMask(super().__call__(layout), layout.slot_positions)
