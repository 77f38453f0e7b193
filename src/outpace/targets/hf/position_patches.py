"""Models that count positions by slots or columns: patched for the time of a pass.

In a chain a slot's number is the position of its token; in a tree it is not. Most models take
``position_ids``. Some parts of others count for themselves, and wrongly in a draft. Each kind of
them has a `PositionPatch`, which lets it count by the layout's positions for one pass.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from outpace.targets.hf.attention import to_attention_mask
from outpace.targets.hf.kinds import is_encoder_decoder
from outpace.targets.hf.masks import PassLayout
from outpace.targets.hf.patching import (
    patch_argument,
    patch_attribute,
    patch_output,
)
from outpace.targets.hf.runner_hooks import PassInfo, RunnerHooks


class PositionPatch(ABC):
    """For one or some modules that count slots or columns where they should count positions."""

    @classmethod
    @abstractmethod
    def find(cls, model: nn.Module, parts: Sequence[nn.Module]) -> Iterator[PositionPatch]:
        """Yields the patches of this kind that a model needs. parts: its modules, but for torch's
        own and ours."""

    @abstractmethod
    def applied(self, layout: PassLayout) -> AbstractContextManager[None]:
        """Lets the modules count by a layout's positions while the block runs. After it the model
        is as it was."""


class PositionPatches(RunnerHooks):
    """All that one model needs; for most models nothing, since they take ``position_ids``."""

    needs_layout = True
    why_not_fixed = "counts positions by slots of the cache"

    def __init__(self, model: nn.Module) -> None:
        # The decoder of an encoder-decoder has patches of its own (`seq2seq.decoder`).
        kinds = () if is_encoder_decoder(model) else KINDS
        known = ("torch.nn.", "outpace.")
        parts = [part for part in model.modules() if not type(part).__module__.startswith(known)]
        self._patches = [patch for kind in kinds for patch in kind.find(model, parts)]

    @property
    def needed(self) -> bool:
        """Whether any part of the model counts otherwise than by ``position_ids``."""
        return bool(self._patches)

    def around(self, given: PassInfo) -> AbstractContextManager[None]:
        assert given.layout is not None
        return self.applied(given.layout)

    @contextmanager
    def applied(self, layout: PassLayout) -> Iterator[None]:
        """Patches the model for a layout while the block runs."""
        with ExitStack() as stack:
            for patch in self._patches:
                stack.enter_context(patch.applied(layout))
            yield


# -- ALiBi -----------------------------------------------------------------------------------------
#
# Biases of attention that grow with the position of a key ("Train Short, Test Long"). Bloom and
# Falcon make them for each slot. In a tree each slot gets the bias of the position that its token
# would have.


class BiasByRow(PositionPatch):
    """Bloom: a bias for each row, head and slot is made by a method."""

    @classmethod
    def find(cls, model: nn.Module, parts: Sequence[nn.Module]) -> Iterator[PositionPatch]:
        yield from (cls(part) for part in parts if hasattr(part, "build_alibi_tensor"))

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module

    @contextmanager
    def applied(self, layout: PassLayout) -> Iterator[None]:
        make = self._module.build_alibi_tensor

        def placed(_: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
            bias = _by_slot(make(_text_like(layout), heads, dtype), layout)
            return bias.reshape(-1, 1, bias.shape[-1])  # [A * H, 1, S]

        with patch_attribute(self._module, "build_alibi_tensor", placed):
            yield


class BiasInMask(PositionPatch):
    """Falcon: the bias is a part of the mask, and stands for rotary angles."""

    @classmethod
    def find(cls, model: nn.Module, parts: Sequence[nn.Module]) -> Iterator[PositionPatch]:
        for part in parts:
            biased = getattr(part, "use_alibi", False) and hasattr(part, "rotary_emb")
            if biased and not hasattr(part, "build_alibi_tensor"):
                yield cls(part)

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        # A function of the module makes the numbers, which are rounded in a way of its own.
        self._make: Any = vars(inspect.getmodule(type(module)))["build_alibi_tensor"]

    @contextmanager
    def applied(self, layout: PassLayout) -> Iterator[None]:
        module = self._module
        with ExitStack() as stack:
            # Without the option the model adds no bias by slot, and turns queries and keys: by 0.
            stack.enter_context(patch_attribute(module, "use_alibi", False))
            stack.enter_context(patch_attribute(module.rotary_emb, "forward", _unturned))
            mask = self._mask(layout)
            for block in module.h:
                stack.enter_context(patch_argument(block, "attention_mask", mask))
            yield

    def _mask(self, layout: PassLayout) -> Tensor:
        """``[A, H, T, S]``: the biases, and the least number where nothing is seen."""
        heads: int = self._module.num_heads
        width = self._module.config.hidden_size // heads
        dtype: torch.dtype = self._module.word_embeddings.weight.dtype
        bias = _by_slot(self._make(_text_like(layout), heads, dtype), layout) / math.sqrt(width)
        return torch.where(layout.seen[:, None], bias[:, :, None], torch.finfo(dtype).min)


def _text_like(layout: PassLayout) -> Tensor:
    """``[1, S]``: the padding mask of a text as long as what is seen, without padding."""
    slots = layout.slot_positions.shape[1]
    return torch.ones(1, slots, dtype=torch.long, device=layout.slot_positions.device)


def _by_slot(bias: Tensor, layout: PassLayout) -> Tensor:
    """Returns ``[A, H, S]``: for each slot the bias of its position, of biases ``[H, 1, S]`` of the
    positions of one text."""
    last = bias.shape[-1] - 1
    return bias[:, 0, layout.slot_positions.clamp(0, last)].transpose(0, 1)


def _unturned(hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Stands for rotary angles of 0: their cosine and sine, each of one number for all."""
    one = hidden.new_ones(1, 1, 1)
    return one, torch.zeros_like(one)


# -- blocks of keys --------------------------------------------------------------------------------
#
# Attention to blocks of keys that an indexer picks (MiniMax M3). The model takes neighbouring slots
# for a block. In a tree several slots have one position, and a column must not see its siblings'
# keys, not even as the best of a block.


class BlockIndexer(PositionPatch):
    """An indexer: the best key of a block decides whether the block is seen."""

    @classmethod
    def find(cls, model: nn.Module, parts: Sequence[nn.Module]) -> Iterator[PositionPatch]:
        for part in parts:
            if hasattr(part, "build_block_mask") and hasattr(part, "topk_blocks"):
                yield cls(part)

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._turn: Any = vars(inspect.getmodule(type(module)))["apply_rotary_pos_emb"]

    @contextmanager
    def applied(self, layout: PassLayout) -> Iterator[None]:
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
            patch_attribute(self._module, "forward", pick),
            patch_attribute(self._module, "build_block_mask", mask),
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

    def _mask(self, picked: Tensor, of_slot: Tensor, layout: PassLayout, blocks: int) -> Tensor:
        """Returns the mask ``[A, heads, T, S]``, of numbers that are added to scores."""
        seen = picked.new_zeros((*picked.shape[:3], blocks + 1), dtype=torch.bool)
        seen.scatter_(-1, picked.masked_fill(picked < 0, blocks), True)
        of_slot = of_slot[:, None, None].expand(*seen.shape[:3], -1)
        kept = seen.gather(-1, of_slot) & layout.seen[:, None]
        each = self._module.config.num_attention_heads // picked.shape[1]
        dtype: torch.dtype = self._module.q_proj.weight.dtype
        mask = torch.zeros(kept.shape, dtype=dtype, device=kept.device)
        return mask.masked_fill(~kept, torch.finfo(dtype).min).repeat_interleave(each, dim=1)


# -- local attention -------------------------------------------------------------------------------
#
# Some layers of GPT-Neo.


class LocalWindow(PositionPatch):
    """A layer whose window counts slots back from the end of a pass: a module cuts it out of a
    table of slots."""

    @classmethod
    def find(cls, model: nn.Module, parts: Sequence[nn.Module]) -> Iterator[PositionPatch]:
        config: Any = model.config
        window = getattr(config, "window_size", None)
        for part in parts:
            local = getattr(part, "attention_type", None) == "local" and hasattr(part, "bias")
            if local and isinstance(window, int):
                yield cls(part, window, config._attn_implementation)

    def __init__(self, module: nn.Module, window: int, attention: str) -> None:
        self._module: Any = module
        self._window = window
        self._attention = attention

    @contextmanager
    def applied(self, layout: PassLayout) -> Iterator[None]:
        slots = layout.seen.shape[-1]
        everything = torch.ones((), dtype=torch.bool, device=layout.seen.device)
        dtype: torch.dtype = self._module.q_proj.weight.dtype
        mask = to_attention_mask(layout.within(self._window), self._attention, dtype)
        with (
            patch_attribute(self._module, "bias", everything.expand(1, 1, slots, slots)),
            patch_argument(self._module, "attention_mask", mask),
        ):
            yield


# -- tables of positions ---------------------------------------------------------------------------
#
# They are looked up by what the cache holds (the decoders of BART and its kin, which take no
# ``position_ids``).


class PositionTable(PositionPatch):
    """A table of positions, whose rows are looked up by the layout's positions."""

    @classmethod
    def find(cls, model: nn.Module, parts: Sequence[nn.Module]) -> Iterator[PositionPatch]:
        if "position_ids" in inspect.signature(model.forward).parameters:
            return
        for part in parts:
            table = getattr(part, "embed_positions", None)
            if isinstance(table, nn.Embedding):
                yield cls(table)

    def __init__(self, table: nn.Embedding) -> None:
        self._table: Any = table

    @contextmanager
    def applied(self, layout: PassLayout) -> Iterator[None]:
        with patch_attribute(self._table, "forward", looked_up(self._table, layout.positions)):
            yield


def looked_up(table: Any, positions: Tensor) -> Callable[..., Tensor]:
    """Returns what stands for a table's ``forward`` while columns have positions ``[A, T]``."""
    rows = positions + getattr(table, "offset", 0)  # before these stand rows of no position
    return lambda *_, **__: embedding(rows, table.weight)


# -- temperature tuning ----------------------------------------------------------------------------
#
# Llama 4: queries of layers without rotary angles grow with their position ("Scalable-Softmax Is
# Superior for Attention"). The model counts positions by columns.


class Temperature(PositionPatch):
    """A layer that scales its queries: here they are scaled as they come out of their product."""

    @classmethod
    def find(cls, model: nn.Module, parts: Sequence[nn.Module]) -> Iterator[PositionPatch]:
        for part in parts:
            tuned = getattr(part, "attn_temperature_tuning", False)
            if tuned and hasattr(part, "floor_scale") and not getattr(part, "use_rope", False):
                yield cls(part)

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module

    @contextmanager
    def applied(self, layout: PassLayout) -> Iterator[None]:
        module = self._module
        steps = torch.floor((layout.positions.float() + 1.0) / module.floor_scale)
        scales = (torch.log1p(steps) * module.attn_scale + 1.0)[..., None]  # [A, T, 1]
        with (
            patch_attribute(module, "attn_temperature_tuning", False),
            patch_output(module.q_proj, lambda queries: (queries * scales).to(queries.dtype)),
        ):
            yield


KINDS: tuple[type[PositionPatch], ...] = (
    BiasByRow,
    BiasInMask,
    BlockIndexer,
    LocalWindow,
    PositionTable,
    Temperature,
)
"""Each finds the parts of a model that it is for."""
