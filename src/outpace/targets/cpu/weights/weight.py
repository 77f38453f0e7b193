"""The tensors of linear layers as our products read them (`csrc/linear.h`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.targets.cpu.weights.blocks import KINDS as BLOCK_KINDS

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float16: 3}
"""Dtypes of weights, by their numbers in `dense_products.h`."""

FIRST_BLOCK_KIND = len(KINDS)
"""The number of the first kind of weights in blocks (`linear.h`); the others follow in the order of
`blocks.KINDS`."""

BLOCK_PANEL = 16
"""Outputs of a panel of weights in blocks, on all processors (`block_formats.h`)."""

LINE = 64
"""Bytes of a line of the processor's cache."""


class BlockShape(NamedTuple):
    """A weight ``[N, K]`` in quantised blocks."""

    kind: str
    """One of `blocks.KINDS`."""
    outputs: int
    inputs: int

    @property
    def number(self) -> int:
        """The number of its kind among those of blocks."""
        return BLOCK_KINDS.index(self.kind)


class Weight(NamedTuple):
    """The tensors of a linear layer with N outputs and K inputs.

    matrix: contiguous, of one of `KINDS`, ``[N, K]`` or in panels ``[N / panel, K, panel]``
    (`to_panels`). scale: float32 ``[N]``, for integers. bias: float32 ``[N]``.
    """

    matrix: Tensor
    scale: Tensor | None
    bias: Tensor | None
    blocks: BlockShape | None = None
    """What a weight in blocks is; its ``matrix`` is what `Native.lay_out_blocks` returns."""

    @property
    def outputs(self) -> int:
        if self.blocks is not None:
            return self.blocks.outputs
        matrix = self.matrix
        return matrix.shape[0] if matrix.dim() == 2 else matrix.shape[0] * matrix.shape[2]

    @property
    def inputs(self) -> int:
        return self.matrix.shape[1] if self.blocks is None else self.blocks.inputs

    @property
    def kind(self) -> int:
        """The number of its kind in `linear.h`."""
        if self.blocks is not None:
            return FIRST_BLOCK_KIND + self.blocks.number
        return KINDS[self.matrix.dtype]

    def some(self, first: int, outputs: int) -> Weight:
        """Returns some outputs in a row, as a layer of the same weights. ``first`` begins a panel
        where the weight is held in these."""
        matrix, scale, bias, blocks = self
        here = slice(first, first + outputs)
        if blocks is not None:
            kind, whole, inputs = blocks
            panels = matrix.view(-(-whole // BLOCK_PANEL), -1)
            matrix = panels[first // BLOCK_PANEL : -(-here.stop // BLOCK_PANEL)].flatten()
            blocks = BlockShape(kind, outputs, inputs)
        elif matrix.dim() == 3:
            panel = matrix.shape[2]
            matrix = matrix[first // panel : here.stop // panel]
        else:
            matrix = matrix[here]
        scale, bias = (None if each is None else each[here] for each in (scale, bias))
        return Weight(matrix, scale, bias, blocks)

    @property
    def panel(self) -> int:
        """Outputs that are held together."""
        if self.blocks is not None:
            return BLOCK_PANEL
        return self.matrix.shape[2] if self.matrix.dim() == 3 else 1


def to_panels(matrix: Tensor, panel: int) -> Tensor:
    """Returns a copy of a weight ``[N, K]`` in panels, ``[N / panel, K, panel]``.

    A panel holds the weights of ``panel`` outputs, input after input. A product computes these
    outputs together, and so reads memory in order.
    """
    outputs, inputs = matrix.shape
    return matrix.view(outputs // panel, panel, inputs).transpose(1, 2).contiguous()


def in_rows(panels: Tensor) -> Tensor:
    """Returns a copy of a weight in panels ``[N / panel, K, panel]`` as plain rows ``[N, K]``."""
    return panels.transpose(1, 2).reshape(-1, panels.shape[1])


class LinearStruct(ctypes.Structure):
    """`Linear` of `linear.h`, field by field."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("in_panels", ctypes.c_int64),
    )


def linear_struct(weight: Weight) -> LinearStruct:
    """Returns a linear layer as the library reads it. Valid as long as the tensors live."""
    tensors = weight.matrix, weight.scale, weight.bias
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
    return LinearStruct(*pointers, weight.outputs, weight.kind, int(weight.matrix.dim() == 3))


def first_outputs(of: LinearStruct, outputs: int) -> LinearStruct:
    """Returns the first ``outputs`` outputs of a layer or more, as a layer of the same weights."""
    cut = LinearStruct.from_buffer_copy(of)
    cut.outputs = min(-(-outputs // LINE) * LINE, of.outputs)  # whole panels
    return cut


class PreparedLinears:
    """Linear layers of the same inputs, as the library reads them."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self.weights = tuple(weights)  # alive as long as somebody may read them
        self.structs = (LinearStruct * len(weights))(*map(linear_struct, weights))
        self.outputs = [weight.outputs for weight in weights]
        self.inputs = weights[0].inputs
        self.size = self.inputs * sum(self.outputs)
        self.in_blocks = any(weight.blocks is not None for weight in weights)
