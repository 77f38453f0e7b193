"""ALiBi: biases of attention that grow with the position of a key ("Train Short, Test Long").

Bloom and Falcon make them for each slot. In a chain a slot's number is its position; in a tree it
is not, and there each slot gets the bias of the position that its token would have.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from outpace.targets.hf.slots.masks import Layout
from outpace.targets.hf.telling import exchange
from outpace.targets.hf.telling.teller import Teller


def tellers(model: nn.Module) -> Iterator[Teller]:
    """Yields what tells a model's parts the positions that their biases are of."""
    for module in model.modules():
        if hasattr(module, "build_alibi_tensor"):
            yield BiasByRow(module)
        elif getattr(module, "use_alibi", False) and hasattr(module, "rotary_emb"):
            yield BiasInMask(module)


class BiasByRow(Teller):
    """Bloom: a bias for each row, head and slot is made by a method."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module

    @contextmanager
    def told(self, layout: Layout) -> Iterator[None]:
        make = self._module.build_alibi_tensor

        def placed(_: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
            bias = _by_slot(make(_text_like(layout), heads, dtype), layout)
            return bias.reshape(-1, 1, bias.shape[-1])  # [A * H, 1, S]

        with exchange.attribute(self._module, "build_alibi_tensor", placed):
            yield


class BiasInMask(Teller):
    """Falcon: the bias is a part of the mask, and stands for rotary angles."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        # A function beside the class makes the numbers, which are rounded in a way of its own.
        self._make: Any = vars(inspect.getmodule(type(module)))["build_alibi_tensor"]

    @contextmanager
    def told(self, layout: Layout) -> Iterator[None]:
        module = self._module
        with ExitStack() as stack:
            # Without the option the model adds no bias by slot, and turns queries and keys: by 0.
            stack.enter_context(exchange.attribute(module, "use_alibi", False))
            stack.enter_context(exchange.attribute(module.rotary_emb, "forward", _unturned))
            mask = self._mask(layout)
            for block in module.h:
                stack.enter_context(exchange.argument(block, "attention_mask", mask))
            yield

    def _mask(self, layout: Layout) -> Tensor:
        """``[A, H, T, S]``: the biases, and the least number where nothing is seen."""
        heads: int = self._module.num_heads
        width = self._module.config.hidden_size // heads
        dtype: torch.dtype = self._module.word_embeddings.weight.dtype
        bias = _by_slot(self._make(_text_like(layout), heads, dtype), layout) / math.sqrt(width)
        return torch.where(layout.seen[:, None], bias[:, :, None], torch.finfo(dtype).min)


def _text_like(layout: Layout) -> Tensor:
    """``[1, S]``: the padding mask of a text as long as what is seen, without padding."""
    slots = layout.slot_positions.shape[1]
    return torch.ones(1, slots, dtype=torch.long, device=layout.slot_positions.device)


def _by_slot(bias: Tensor, layout: Layout) -> Tensor:
    """Returns ``[A, H, S]``: for each slot the bias of its position, of biases ``[H, 1, S]`` of the
    positions of one text."""
    last = bias.shape[-1] - 1
    return bias[:, 0, layout.slot_positions.clamp(0, last)].transpose(0, 1)


def _unturned(hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Stands for rotary angles of 0: their cosine and sine, each of one number for all."""
    one = hidden.new_ones(1, 1, 1)
    return one, torch.zeros_like(one)
