"""Attention to blocks of keys that an indexer picks (MiniMax M3).

The model takes neighbouring slots for a block. In a tree several slots have one position, and a
column must not see its siblings' keys, not even as the best of a block.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from outpace.targets.hf.slots.masks import Layout
from outpace.targets.hf.telling import exchange
from outpace.targets.hf.telling.teller import Teller


def tellers(model: nn.Module) -> Iterator[Teller]:
    """Yields what tells a model's indexers which block each slot belongs to."""
    for module in model.modules():
        if hasattr(module, "build_block_mask") and hasattr(module, "topk_blocks"):
            yield BlockIndexer(module)


class BlockIndexer(Teller):
    """An indexer: the best key of a block decides whether the block is seen."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._turn: Any = vars(inspect.getmodule(type(module)))["apply_rotary_pos_emb"]

    @contextmanager
    def told(self, layout: Layout) -> Iterator[None]:
        size: int = self._module.block_size
        blocks = -(-layout.seen.shape[-1] // size)
        of_slot = (layout.slot_positions // size).clamp(0, blocks - 1)  # [A, S]
        of_column = (layout.positions // size).clamp(0, blocks - 1)  # [A, T]

        def pick(
            hidden: Tensor, angles: tuple[Tensor, Tensor], cache: Any, position_ids: Tensor
        ) -> Tensor:
            scores = self._scores(hidden, angles, cache)  # [A, H, T, S]
            scores = scores.masked_fill(~layout.seen[:, None], -torch.inf)
            best = scores.new_full((*scores.shape[:3], blocks), -torch.inf)
            best.scatter_reduce_(-1, of_slot[:, None, None].expand_as(scores), scores, "amax")
            return self._best(best, of_column)

        def mask(picked: Tensor, *_: Any) -> Tensor:
            return self._mask(picked, of_slot, layout, blocks)

        with (
            exchange.attribute(self._module, "forward", pick),
            exchange.attribute(self._module, "build_block_mask", mask),
        ):
            yield

    def _scores(self, hidden: Tensor, angles: tuple[Tensor, Tensor], cache: Any) -> Tensor:
        """``[A, H, T, S]``: how well each column matches each slot; writes the new keys."""
        module = self._module
        rows, columns, _ = hidden.shape
        shape = (rows, columns, -1, module.head_dim)
        queries = module.q_norm(module.q_proj(hidden).view(shape)).transpose(1, 2)
        keys = module.k_norm(module.k_proj(hidden).view(shape)).transpose(1, 2)
        cosine, sine = (angle[..., : module.head_dim] for angle in angles)
        queries, keys = self._turn(queries, keys, cosine, sine)
        keys = cache.layers[module.layer_idx].update_index(keys)
        return torch.matmul(queries.float(), keys.float().transpose(-1, -2))

    def _best(self, scores: Tensor, of_column: Tensor) -> Tensor:
        """Returns ``[A, H, T, K]``: the numbers of the best blocks by ``scores`` ``[A, H, T, N]``,
        among them each column's own and those right before it; -1 for those that hold nothing."""
        module = self._module
        if module.local_blocks > 0:
            back = torch.arange(module.local_blocks, device=scores.device)
            local = (of_column[..., None] - back).clamp(min=0)[:, None]  # [A, 1, T, L]
            local = local.expand(-1, scores.shape[1], -1, -1)
            scores.scatter_(-1, local, torch.inf)
        best, picked = scores.topk(min(module.topk_blocks, scores.shape[-1]), dim=-1)
        return picked.masked_fill(best == -torch.inf, -1)

    def _mask(self, picked: Tensor, of_slot: Tensor, layout: Layout, blocks: int) -> Tensor:
        """Returns the mask ``[A, heads, T, S]``, of numbers that are added to scores."""
        seen = picked.new_zeros((*picked.shape[:3], blocks + 1), dtype=torch.bool)
        seen.scatter_(-1, picked.masked_fill(picked < 0, blocks), True)
        of_slot = of_slot[:, None, None].expand(*seen.shape[:3], -1)
        kept = seen.gather(-1, of_slot) & layout.seen[:, None]
        each = self._module.config.num_attention_heads // picked.shape[1]
        dtype: torch.dtype = self._module.q_proj.weight.dtype
        mask = torch.zeros(kept.shape, dtype=dtype, device=kept.device)
        return mask.masked_fill(~kept, torch.finfo(dtype).min).repeat_interleave(each, dim=1)
