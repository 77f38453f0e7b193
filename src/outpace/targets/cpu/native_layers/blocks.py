"""Linear layers and embeddings in quantised blocks, on our own integer products.

A weight is laid out once, in panels of 16 outputs, and is read only so. Its codes and scales are
the file's, without any loss. Activations are rounded to 8 bits, in blocks of 32 inputs of a row,
and the sums within a block are exact (`block_products.h`): a row has the same bits in any company.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from outpace.targets.cpu.linear import as_custom_op
from outpace.targets.cpu.native import Native, native
from outpace.targets.cpu.native_layers.product import NativeProduct, in_panels
from outpace.targets.cpu.weights.blocks import BlockEmbedding, BlockLinear, Blocks
from outpace.targets.cpu.weights.experts import BlockExperts
from outpace.targets.cpu.weights.latents import BlockLatents
from outpace.targets.cpu.weights.layers import OnDemandWeight, replace_modules
from outpace.targets.cpu.weights.weight import BLOCK_PANEL, BlockShape, PreparedLinears, Weight


class NativeBlockLinear(OnDemandWeight, NativeProduct):
    """A linear layer whose weight stays in blocks, multiplied as integers.

    ``weight`` and ``state_dict`` show the weight dequantised, as a copy that is made at each look.
    """

    panels: Tensor
    """uint8, flat: as `Native.lay_out_blocks` lays blocks out, the same on all processors."""

    def __init__(
        self, library: Native, blocks: Blocks, bias: Any = None, inputs: int | None = None
    ) -> None:
        """inputs: K, if rows of blocks are filled up with zeros after it."""
        inputs = blocks.inputs if inputs is None else inputs
        super().__init__(library, blocks.outputs, inputs)
        self.shape = BlockShape(blocks.kind, blocks.outputs, inputs)
        self.register_buffer("panels", library.lay_out_blocks(blocks), persistent=False)
        self.bias = bias
        self.loaded_bytes = blocks.nbytes

    @property
    def kind(self) -> str:
        """The kind of its blocks."""
        return self.shape.kind

    @property
    def read(self) -> Tensor:
        """The tensor that products read."""
        return self.panels

    def place(self) -> tuple[Any, str]:
        """Returns the dictionary that holds `read`, and its name there."""
        return self._buffers, "panels"

    @property
    def packed_bytes(self) -> int:
        """Bytes of the weight, which is no parameter."""
        return self.panels.nbytes

    @property
    def weight(self) -> Tensor:
        """``[N, K]``, float32, dequantised: a copy that is made at each look."""
        return self.library.dequantize_blocks(self.panels, self.shape)

    def as_weight(self) -> Weight:
        """Returns the tensors that products read."""
        bias = None if self.bias is None else self.bias.float()
        return Weight(self.panels, None, bias, self.shape)

    def some(self, outputs: Sequence[int]) -> tuple[Weight, list[int]]:
        """Returns the panels that hold some outputs, and where in these they are."""
        kind, count, inputs = self.shape
        panels, where = in_panels(outputs, BLOCK_PANEL)
        matrix = self.panels.view(-(-count // BLOCK_PANEL), -1)[panels].flatten()
        bias = None
        if self.bias is not None:
            filled = functional.pad(self.bias.float(), (0, -count % BLOCK_PANEL))
            bias = filled.view(-1, BLOCK_PANEL)[panels].flatten()
        shape = BlockShape(kind, BLOCK_PANEL * len(panels), inputs)
        return Weight(matrix, None, bias, shape), where

    def dense(self, x: Tensor) -> Tensor:
        """Returns the product by torch, with activations that are not rounded."""
        return functional.linear(x, self.weight.to(x), self.bias)

    def part(self, x: Tensor, first: int, outputs: int) -> Tensor:
        """Returns some outputs in a row of the product, ``[..., outputs]``; ``first`` begins a
        panel."""
        weight = self.as_weight().some(first, outputs)
        if not self._can(x):
            assert weight.blocks is not None
            plain = self.library.dequantize_blocks(weight.matrix, weight.blocks)
            return functional.linear(x, plain.to(x), weight.bias)
        y = self.library.products(x.float().contiguous(), PreparedLinears([weight]))
        return y.view(*x.shape[:-1], outputs).to(x.dtype)

    def compiled(self, x: Tensor) -> Tensor:
        """Returns the product as an operator that torch's compiler leaves alone."""
        product = as_custom_op("block_linear", _product, _empty)
        matrix, _, bias, _ = self.as_weight()
        y: Tensor = product(x.float().contiguous(), matrix, bias, *self.shape)
        return y.to(x.dtype)


class NativeBlockEmbedding(BlockEmbedding):
    """An embedding whose table stays in blocks; our own code dequantises rows as they are looked
    up."""

    def __init__(self, library: Native, embedding: BlockEmbedding) -> None:
        super().__init__(embedding.blocks, embedding.dtype, embedding.scale)
        self.library = library

    def dequantized(self, rows: Blocks) -> Tensor:
        """Returns what a few rows of blocks stand for, float32 ``[R, K]``."""
        return self.library.dequantize_rows(rows)


WHOLE = (BlockExperts, BlockLatents)
"""Modules that are replaced as a whole where blocks are dequantised."""


def use_block_kernels(model: nn.Module) -> int:
    """Lets our own products compute the layers of a model whose weights are in blocks, in place;
    returns how many layers. None, where there is no C++ compiler."""
    library = native()
    if library is None:
        return 0
    places = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) in (BlockLinear, BlockEmbedding)
    ]
    return replace_modules(places, lambda layer: _of_our_own(library, layer))


def _of_our_own(library: Native, layer: BlockLinear | BlockEmbedding) -> nn.Module:
    """The layer that our own code computes."""
    if isinstance(layer, BlockEmbedding):
        return NativeBlockEmbedding(library, layer)
    return NativeBlockLinear(library, layer.blocks, layer.bias)


def dequantize_blocks(model: nn.Module, dtype: torch.dtype = torch.float32) -> int:
    """Puts plain layers in the place of those that multiply blocks; returns the bytes of
    their weights. Embeddings stay in blocks: their rows are dequantised exactly as they are looked
    up.
    """
    places = [
        (parent, name)
        for parent in model.modules()
        if not isinstance(parent, WHOLE)
        for name, child in parent.named_children()
        if isinstance(child, (BlockLinear, NativeBlockLinear, *WHOLE))
    ]
    made: list[nn.Module] = []

    def dequantized(layer: Any) -> nn.Module:
        whole = isinstance(layer, WHOLE)
        made.append(layer.dequantized(dtype) if whole else _dequantized(layer, dtype))
        return made[-1]

    replace_modules(places, dequantized)
    numbers = [each for layer in made for each in layer.parameters() if each.dim() > 1]
    return sum(each.nbytes for each in numbers)


def _dequantized(layer: BlockLinear | NativeBlockLinear, dtype: torch.dtype) -> nn.Linear:
    """The plain layer with the same weight. None of its parameters is trained."""
    weight = layer.weight.to(dtype)
    plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    plain.weight = nn.Parameter(weight, requires_grad=False)
    plain.bias = layer.bias
    return plain.train(layer.training)


def _product(
    x: Tensor, panels: Tensor, bias: Tensor | None, kind: str, outputs: int, inputs: int
) -> Tensor:
    library = native()
    assert library is not None, "its layers exist"
    weight = Weight(panels, None, bias, BlockShape(kind, outputs, inputs))
    return library.products(x, PreparedLinears([weight])).view(*x.shape[:-1], outputs)


def _empty(
    x: Tensor, panels: Tensor, bias: Tensor | None, kind: str, outputs: int, inputs: int
) -> Tensor:
    return x.new_empty(*x.shape[:-1], outputs)
