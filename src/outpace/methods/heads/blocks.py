"""A head that guesses a whole block at once drafts chains or trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from outpace.core.transfer import to_device
from outpace.draft.base import RowInfo, Rows
from outpace.heads.base import Head
from outpace.heads.blocks.base import BlockHead
from outpace.methods.heads.base import HeadDrafter, TreeHeadOptions
from outpace.methods.heads.by_depth import ByDepth
from outpace.methods.heads.text_cache import TextCache
from outpace.targets.base import Target


class BlockHeadDrafter(HeadDrafter):
    """Drafts with a `BlockHead`, in one pass whatever the draft's depth.

    The block is always as long as the head was trained for, so that a row's distributions do not
    depend on how much is drafted. They do not depend on the other tokens of the draft either. So a
    token that is drawn from its distribution, from the root down, was drawn from its distribution
    given all before it, which is what `Sampled` says, and a node's children have the distribution
    of their depth, whatever the node is. The entries of committed tokens are computed as the tokens
    come and kept. A row whose prompt is a single token has none and proposes nothing in its first
    round.
    """

    Options: ClassVar[type[Any]] = TreeHeadOptions

    def __init__(self, head: Head, target: Target, vocabulary: int) -> None:
        super().__init__(head, target, vocabulary)
        self.head = cast(BlockHead, self._head)
        self._cache = TextCache(self.head, target.rows)

    @property
    def nbytes(self) -> int:
        return self.weight_bytes + self._cache.nbytes

    @property
    def deepest(self) -> int:
        return self.head.config.depths

    def admit(self, rows: Sequence[RowInfo]) -> None:
        for info in rows:
            known = 0 if info.forked_from is None else len(info.prompt) - 1
            self._cache.admit(info.forked_from, known)

    @torch.inference_mode()
    def read(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], states: Tensor) -> None:
        begin = to_device([self._cache.lengths[row] for row in rows], states.device)
        columns = torch.arange(states.shape[1], device=states.device)
        entries = self.head.entries(states, begin[:, None] + columns)
        self._cache.append(rows, entries, [len(each) for each in tokens])

    def retain(self, rows: Sequence[int]) -> None:
        self._cache.retain(rows)

    def knows(self, row: int) -> bool:
        return self._cache.lengths[row] > 0

    @torch.inference_mode()
    def walk(self, rows: Rows) -> ByDepth:
        numbers = range(len(rows))
        before, own = self._cache.of(numbers)
        roots = [rows.since(row, rows.length(row) - 1) for row in numbers]
        places = [[self._cache.lengths[row]] for row in numbers]
        logits = self.head.block(
            to_device(roots, own.device),
            to_device(places, own.device),
            before,
            own[:, None],
            self._target,
        )
        return ByDepth(self._vocabulary.logits(logits[:, 0]))
