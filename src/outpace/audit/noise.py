"""The same logits computed in two ways, and how far rounding takes them apart.

Read plainly: one forward of the whole text without a cache, under the model's own mask. Scored as
drafted: the text is read piece by piece into the engine's cache, then its last tokens are scored
in one pass as a drafted chain, or as one path of a drafted tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outpace.core.tree import Tree
from outpace.targets.hf.cache import BUCKET
from outpace.targets.hf.runner import Runner

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
_LONG = BUCKET + 2 * _PIECE
"""Tokens of the one long text that is always measured: more than the cache's first buffers hold,
and enough to be read in several pieces before and after they grow."""


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
def read_plainly(model: nn.Module, ids: Sequence[int], keep: int) -> Tensor:
    """Returns ``[keep, V]``: the logits after each of the last ``keep`` tokens."""
    tokens = torch.tensor([list(ids)], device=_device(model))
    logits: Tensor = model(input_ids=tokens, use_cache=False, logits_to_keep=keep).logits[0]
    return logits


def score_as_drafted(
    model: nn.Module, ids: Sequence[int], drafted: int, tree: bool = False
) -> Tensor:
    """Returns ``[drafted + 1, V]``: the logits after each of the last ``drafted + 1`` tokens, the
    first of them the root of a draft and the others its nodes.

    tree: give every node a sibling (another token) that must not make a difference.
    """
    runner = Runner(model, rows=1, max_length=max(len(ids), 2) + 2 * drafted)
    runner.admit(1)
    start = len(ids) - drafted - 1
    for begin in range(0, start, _PIECE):
        runner.prefill(0, [list(ids[begin : min(start, begin + _PIECE)])])
    root, chain = ids[start], list(ids[start + 1 :])
    size = runner.config.vocab_size
    if not tree or not chain:
        tokens = torch.tensor([[root, *chain]], device=runner.device)
        return _logits(runner.forward(tokens, keep=len(chain) + 1))
    nodes = [node for token in chain for node in (token, (token + 1) % size)]
    parents = [max(0, 2 * (node // 2) - 1) for node in range(len(nodes))]
    path = [0, *range(1, len(nodes) + 1, 2)]
    shape = Tree.uniform(parents, 1, runner.device)
    tokens = torch.tensor([[root, *nodes]], device=runner.device)
    return _logits(runner.forward(tokens, keep=len(nodes) + 1, tree=shape))[path]


def measure(
    model: nn.Module, texts: Sequence[Sequence[int]], drafted: int, tree: bool = False
) -> Noise:
    """Returns how far the two ways are apart on these texts and on one long text made of them.

    drafted: how many of the last tokens are scored as a draft. tree: with a sibling beside each.
    """
    measured, spread = 0.0, 0.0
    for ids in [*texts, _long(model, texts, drafted)]:
        count = min(drafted, len(ids) - 1)
        plain = read_plainly(model, ids, count + 1).double()
        scored = score_as_drafted(model, ids, count, tree).double()
        measured = max(measured, float((plain - scored).abs().max()))
        spread = max(spread, float(plain.std()))
    dtype = next(model.parameters()).dtype
    cap = _CAPS.get(dtype, _NARROW_CAP) * spread
    floor = 4 * torch.finfo(dtype).eps * spread
    return Noise(measured, cap, min(max(_MARGIN * measured, floor), cap))


def _long(model: Any, texts: Sequence[Sequence[int]], drafted: int) -> list[int]:
    """Returns the texts one after another, again and again, up to `_LONG` tokens or as many as the
    model's context and the siblings of a drafted tree leave room for."""
    limit: int = getattr(model.config.get_text_config(), "max_position_embeddings", _LONG)
    joined = [token for ids in texts for token in ids]
    length = max(1, min(_LONG, limit - 2 * drafted))
    return (joined * (length // max(1, len(joined)) + 1))[:length]


def _logits(output: Any) -> Tensor:
    logits: Tensor = output.logits[0]
    return logits


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
