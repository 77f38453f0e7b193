"""The same logits computed in two ways, and how far rounding takes them apart.

Read plainly: one forward of the whole text without a cache, under the model's own mask. Scored as
drafted: the text is read piece by piece into the engine's cache, then its last tokens are scored
in one pass as a drafted chain, or as one path of a drafted tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.core.trees.tree import Tree
from outpace.targets.base import PromptInputs, ScoreInputs, Target

_CAPS = {torch.float64: 1e-7, torch.float32: 2e-3}
_NARROW_CAP = 0.3
"""By dtype, and for all narrower ones: a greater difference of two logits, in standard deviations
of the logits, is not rounding. (Deep models stay below 1e-4 in float32, below 0.1 in bfloat16.)"""
_MARGIN = 4.0
"""The tolerance is this many times the worst difference measured, because the difference is
measured on far fewer texts than are decoded."""
_PIECE = 64
"""Tokens that are read at a time, so that the cache grows while it holds something, as it does
when a text is generated."""
_LONG = 384
"""Tokens of the one long text that is always measured: more than a cache's first buffers hold, and
enough to be read in several pieces before and after they grow."""


@dataclass(frozen=True)
class Noise:
    """How far apart the logits of the two ways are on one model."""

    measured: float
    """Greatest difference of two logits, over all texts and positions that were measured."""
    cap: float
    """Greatest difference that can be rounding, whatever was measured."""
    tolerance: float
    """What is taken for rounding: the measured difference with a margin, never more than the
    cap."""

    @property
    def excessive(self) -> bool:
        """Whether the two ways differ by more than rounding, which is a defect by itself."""
        return not self.measured <= self.cap


@torch.inference_mode()
def score_as_drafted(
    target: Target, ids: Sequence[int], drafted: int, tree: bool = False
) -> Tensor:
    """Returns ``[drafted + 1, V]``: the logits after each of the last ``drafted + 1`` tokens, the
    first of them the root of a draft and the others its nodes.

    tree: give every node a sibling (another token) that must not make a difference.
    """
    reader = target.new_target(rows=1)
    start = len(ids) - drafted - 1
    _read(reader, ids[: start + 1])
    nodes, parents = list(ids[start + 1 :]), list(range(drafted))
    path = list(range(drafted + 1))
    if tree:
        # Siblings side by side: 1 and 2 below the root, 3 and 4 below node 1, 5 and 6 below 3.
        nodes = [node for token in nodes for node in (token, 0 if token else 1)]
        parents = [max(0, 2 * (node // 2) - 1) for node in range(len(nodes))]
        path = [0, *range(1, len(nodes) + 1, 2)]
    shape = Tree.uniform(parents, 1, target.device)
    return reader.score(ScoreInputs([[ids[start]]], _row(nodes, target), shape)).logits[0, path]


def _read(reader: Target, text: Sequence[int]) -> None:
    """Reads all but the last token of a text into a target's only row, piece by piece."""
    reader.admit(PromptInputs(text[:1]))
    while reader.num_ready_rows < reader.num_rows:
        reader.prefill(_PIECE)
    end, nothing = len(text) - 1, Tree.chain(1, 0, reader.device)
    for begin in range(0, end, _PIECE):
        piece = list(text[begin : min(end, begin + _PIECE)])
        reader.score(ScoreInputs([piece], _row([], reader), nothing))
        reader.commit([[]])


def _row(tokens: Sequence[int], target: Target) -> Tensor:
    """``[1, N]``: the tokens as those of one row."""
    return torch.tensor([list(tokens)], dtype=torch.long, device=target.device)


def measure(
    target: Target, texts: Sequence[Sequence[int]], drafted: int, tree: bool = False
) -> Noise:
    """Returns how far the two ways are apart on these texts and on one long text made of them.

    drafted: how many of the last tokens are scored as a draft. tree: with a sibling next to each.
    """
    measured, spread = 0.0, 0.0
    for ids in [*texts, _long(target, texts, drafted)]:
        count = min(drafted, len(ids) - 1)
        plain = target.forward_uncached(ids, last=count + 1).double()
        scored = score_as_drafted(target, ids, count, tree).double()
        apart = float((plain - scored).abs().max())
        measured = max(measured, math.inf if math.isnan(apart) else apart)
        spread = max(spread, float(plain.std()))
    cap = _CAPS.get(target.dtype, _NARROW_CAP) * spread
    floor = 4 * torch.finfo(target.dtype).eps * spread
    return Noise(measured, cap, min(max(_MARGIN * measured, floor), cap))


def _long(target: Target, texts: Sequence[Sequence[int]], drafted: int) -> list[int]:
    """Returns the texts one after another, again and again, up to `_LONG` tokens or as many as the
    model's context and the siblings of a drafted tree leave room for."""
    joined = [token for ids in texts for token in ids]
    length = max(1, min(_LONG, target.max_length - 2 * drafted))
    return (joined * (length // max(1, len(joined)) + 1))[:length]
