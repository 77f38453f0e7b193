"""Base of block heads, which guess a whole block of tokens in one pass.

Such a head is a small decoder over the text and a block of masks after it. Entry i of a text is
made of the target's states at token i and stays as it is. The block, the root and masks, attends to
the entries before the root and, in both directions, to itself. What comes out at a mask says which
token stands there, whatever stands at the others: the distributions of a block follow from the text
alone, unless the head goes on to join them (`dspark`).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from outpace.core.request import Request
from outpace.core.transfer import to_device
from outpace.draft.base import Rows
from outpace.heads.base import Head, SharedModules
from outpace.heads.layers import KeyValues
from outpace.methods.heads.base import DraftSteps, HeadDrafter, ParallelDraftSteps, TreeHeadOptions
from outpace.methods.heads.head_kv_cache import HeadKVCache
from outpace.targets.base import Target
from outpace.train.recipe import DepthLosses, LossOutput, Recipe, joined
from outpace.train.teacher import TeacherBatch

# -- the network -----------------------------------------------------------------------------------


class BlockHead(Head):
    """Guesses all tokens after the root at once, from all of a text."""

    @classmethod
    def recipe(cls) -> type[Recipe]:
        return BlockRecipe

    @property
    def num_parallel_depths(self) -> int:
        return self.config.depths

    @abstractmethod
    def begin(self, rows: int) -> KeyValues:
        """Returns no entries of ``rows`` rows."""

    @abstractmethod
    def entries(self, states: Tensor, positions: Tensor) -> KeyValues:
        """Returns the entries of a text, to which blocks attend.

        states: ``[B, W, len(layers) H]``, the target's at W tokens; positions: ``[B, W]``, the
        numbers of the tokens in their texts, from 0.
        """

    @abstractmethod
    def outputs(
        self,
        roots: Tensor,
        positions: Tensor,
        before: KeyValues,
        visible: Tensor,
        shared: SharedModules,
    ) -> Tensor:
        """Returns what the K tokens after each of A roots are guessed from, ``[B, A, K, H]``, K
        being ``config.depths``.

        roots: ``[B, A]``, tokens of the target; positions: ``[B, A]``, their numbers in their
        texts. visible: ``[B, A, L]`` bool, which of the L entries before each of them attends to.
        """

    @abstractmethod
    def logits(self, outputs: Tensor, shared: SharedModules) -> Tensor:
        """Returns the logits ``[..., V']`` that follow from outputs ``[..., H]`` alone."""

    def block(
        self,
        roots: Tensor,
        positions: Tensor,
        before: KeyValues,
        visible: Tensor,
        shared: SharedModules,
    ) -> Tensor:
        """Returns the logits ``[B, A, K, V']`` of whole blocks. Arguments as of `outputs`."""
        return self.logits(self.outputs(roots, positions, before, visible, shared), shared)


# -- how it is trained -----------------------------------------------------------------------------

# How heads that guess a whole block at once are trained: on blocks after many places of a text.
#
# Chen et al. 2026, arXiv 2602.06036, section 4.2.


BLOCKS = 32
"""Blocks of a text that are looked at together: their logits take memory."""


class BlockRecipe(Recipe):
    """The loss of a `BlockHead`.

    While it learns, blocks begin at random places of a text; while it is measured, at all of them.
    A wrong token makes those after it worthless, so that the first ones weigh most: each
    ``exp(-1 / g)`` of the one before, with g half of a block, and 7 at most.
    """

    def __init__(self, head: BlockHead, shared: SharedModules) -> None:
        self._head, self._shared = head, shared
        wide = head.config.depths + 1
        self._decay = math.exp(-1 / min(wide / 2, 7))

    def compute_loss(self, batch: TeacherBatch) -> LossOutput:
        rows, length = batch.tokens.shape
        device = batch.tokens.device
        at = torch.arange(length, device=device)
        before = self._head.entries(batch.hidden_states.float(), at.expand(rows, -1))
        count = length - self._head.config.depths
        if torch.is_grad_enabled():
            chosen = [torch.randperm(count)[:BLOCKS].to(device)]
        else:
            chosen = list(torch.split(torch.arange(count, device=device), BLOCKS))
        outputs = []
        for places in chosen:
            visible = (at <= places[:, None]).expand(rows, -1, -1)  # [B, P, T]
            losses = DepthLosses(self._head, batch, places, decay=self._decay)
            roots = losses.path()
            positions = (places + 1).expand(rows, -1)
            made = self._head.outputs(roots, positions, before, visible, self._shared)
            self.add(losses, made, self._head.logits(made, self._shared))
            outputs.append(losses.output())
        return joined(outputs)

    def add(self, losses: DepthLosses, outputs: Tensor, logits: Tensor) -> None:
        """Adds the guesses of all depths to the losses. outputs: ``[B, P, K, H]``; logits:
        ``[B, P, K, V']``, those that follow from them."""
        for depth in range(logits.shape[2]):
            losses.add(logits[:, :, depth])


# -- how it drafts ---------------------------------------------------------------------------------


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
        self._cache: HeadKVCache = HeadKVCache(self.head, target.max_rows)

    @property
    def max_depth(self) -> int:
        return self.head.config.depths

    def begin(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.begin_row(request, request.length - 1)

    @torch.inference_mode()
    def read(
        self, requests: Sequence[Request], tokens: Sequence[Sequence[int]], states: Tensor
    ) -> None:
        rows = self._rows.of(requests)
        begin = to_device([self._cache.lengths[row] for row in rows], states.device)
        columns = torch.arange(states.shape[1], device=states.device)
        entries = self.head.entries(states, begin[:, None] + columns)
        self._cache.append(rows, entries, [len(each) for each in tokens])

    def can_draft(self, rows: Rows, row: int) -> bool:
        return self._cache.lengths[row] > 0

    def draft_steps(self, rows: Rows) -> DraftSteps:
        return ParallelDraftSteps(self._vocab_mapping.to_target_logits(self._blocks(rows)[2]))

    @torch.inference_mode()
    def _blocks(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """The roots ``[B, 1]``, what the tokens after them are guessed from, ``[B, K, H]``, and the
        logits ``[B, K, V']`` that follow from it."""
        numbers = range(len(rows))
        before, own = self._cache.of(numbers)
        roots = to_device([[rows.root(row)] for row in numbers], own.device)
        places = to_device([[self._cache.lengths[row]] for row in numbers], own.device)
        outputs = self.head.outputs(roots, places, before, own[:, None], self._target)[:, 0]
        return roots, outputs, self.head.logits(outputs, self._target)
