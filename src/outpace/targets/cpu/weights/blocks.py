"""Weights in quantised blocks, as GGUF files hold them, and the layers that read them.

A block is a few dozen weights of one row that share a scale: four to eight bits for each weight and
a few bytes for the scale. A weight stays in its blocks in memory and is dequantised only where it
is needed. The layers here are the plain way, which works everywhere: they dequantise a whole weight
for each product. Our own integer products take their place where there are some.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from outpace.errors import UnsupportedModel
from outpace.targets.cpu.weights.layers import OnDemandWeight

CHUNK = 1 << 22
"""Weights that are dequantised at a time, so that a product needs little memory besides."""

KINDS = (
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"),
    *("MXFP4", "IQ4_NL", "IQ4_XS", "Q2_K", "Q3_K"),
    *("IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S", "IQ1_M"),
)
"""The kinds of blocks that weights stay in, by their names in GGUF."""


@cache
def dequantizes(kind: str) -> bool:
    """Returns whether the installed `gguf` makes numbers of blocks of a kind."""
    type_ = gguf.GGMLQuantizationType[kind]
    block = np.zeros((1, gguf.GGML_QUANT_SIZES[type_][1]), np.uint8)
    try:
        gguf.quants.dequantize(block, type_)
    except NotImplementedError:
        return False
    return True


@cache
def grid_codes(kind: str) -> Tensor | None:
    """Returns the list from which a kind of blocks names some numbers at once, as the codes of
    `block_formats.h`, uint8 ``[places, 4 or 8]``; None for kinds without.

    Codes go from the smallest number to the largest. In the list are those of numbers with the sign
    of plus, or, of the kinds IQ1, of numbers that are shifted up.
    """
    if not kind.startswith(("IQ1", "IQ2", "IQ3")):
        return None
    reader: Any = getattr(gguf.quants, kind)
    reader.init_grid()
    order = np.searchsorted(reader.grid_map, reader.grid[0, 0])  # from the smallest one
    count = len(reader.grid_map)
    codes = 2 * order + 1 if kind.startswith("IQ1") else count + order
    return torch.from_numpy(np.ascontiguousarray(codes, dtype=np.uint8))


@dataclass(frozen=True, eq=False)
class Blocks:
    """A matrix ``[N, K]`` in quantised blocks along K."""

    kind: str
    """One of `KINDS`."""
    raw: Tensor
    """uint8 ``[N, bytes of a row]``, contiguous; maybe a read-only view of a mapped file."""
    release: Callable[[int, int], None] | None = None
    """Takes bytes of a mapped file out of memory, from one of `raw` to before another, until
    somebody looks at them again."""

    def __getstate__(self) -> dict[str, Any]:
        """Returns what copies and pickles hold: bytes of their own, not the file's."""
        return {**self.__dict__, "release": None}

    @property
    def outputs(self) -> int:
        return self.raw.shape[0]

    @property
    def inputs(self) -> int:
        size, nbytes = gguf.GGML_QUANT_SIZES[self._type]
        return self.raw.shape[1] // nbytes * size

    @property
    def nbytes(self) -> int:
        return self.raw.nbytes

    def dense(self, rows: slice | None = None) -> Tensor:
        """Returns the matrix, or some of its rows, as float32 ``[R, K]``."""
        raw = self.raw if rows is None else self.raw[rows]
        if len(raw) == 0:  # which the library cannot give a shape to
            return torch.empty(0, self.inputs)
        return torch.from_numpy(gguf.quants.dequantize(raw.numpy(), self._type))

    def rows(self, ids: Tensor) -> Blocks:
        """Returns some rows ``[R]`` of the matrix, copied. Raises ``IndexError`` beyond it."""
        return Blocks(self.kind, self.raw[ids])

    def __deepcopy__(self, _: Any) -> Blocks:
        """Returns the blocks themselves: nothing changes them, and they may be a mapped file."""
        return self

    def product(self, x: Tensor) -> Tensor:
        """Returns x ``[..., K]`` times the matrix, ``[..., N]``, in the dtype of x."""
        y = x.new_empty(*x.shape[:-1], self.outputs)
        step = max(1, CHUNK // self.inputs)
        for begin in range(0, self.outputs, step):
            some = slice(begin, begin + step)
            y[..., some] = functional.linear(x, self.dense(some).to(x))
        return y

    @property
    def _type(self) -> gguf.GGMLQuantizationType:
        return gguf.GGMLQuantizationType[self.kind]


def in_blocks(matrix: Tensor, kind: str) -> Blocks:
    """Returns a float matrix ``[N, K]`` rounded to blocks; of the kinds that `gguf` can write."""
    type_ = gguf.GGMLQuantizationType[kind]
    raw = gguf.quants.quantize(matrix.detach().float().numpy(), type_)
    return Blocks(kind, torch.from_numpy(np.ascontiguousarray(raw)))


def embedding_dtype(embedding: Any) -> torch.dtype:
    """Returns the dtype of what an embedding gives, without dequantising a table in blocks."""
    if isinstance(embedding, BlockEmbedding):
        return embedding.dtype
    found: torch.dtype = embedding.weight.dtype
    return found


def block_bytes(model: nn.Module) -> dict[str, int]:
    """Returns how many bytes of a model's weights are in blocks of each kind.

    Counted are layers that say their ``kind`` and ``packed_bytes``, ours for blocks whatever
    computes them. Blocks that several layers share (``blocks``) count once.
    """
    layers: list[Any] = [m for m in model.modules() if getattr(m, "kind", None) in KINDS]
    distinct = {id(getattr(layer, "blocks", layer)): layer for layer in layers}
    sizes: dict[str, int] = {}
    for layer in distinct.values():
        sizes[layer.kind] = sizes.get(layer.kind, 0) + layer.packed_bytes
    return sizes


class InBlocks(OnDemandWeight):
    """A layer whose weight stays in blocks."""

    def __init__(self, blocks: Blocks) -> None:
        super().__init__()
        self.blocks = blocks

    @property
    def kind(self) -> str:
        """The kind of its blocks."""
        return self.blocks.kind

    @property
    def packed_bytes(self) -> int:
        """Bytes of the blocks, which are no parameter."""
        return self.blocks.nbytes


class BlockLinear(InBlocks):
    """A linear layer whose weight stays in blocks; each product dequantises all of them.

    ``weight`` and ``state_dict`` show the weight dequantised, anew each time.
    """

    def __init__(self, blocks: Blocks, bias: Tensor | None = None) -> None:
        super().__init__(blocks)
        self.out_features, self.in_features = blocks.outputs, blocks.inputs
        self.bias: Any = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: ``[..., K]`` -> ``[..., N]``."""
        y = self.blocks.product(x)
        return y if self.bias is None else y + self.bias

    def part(self, x: Tensor, first: int, outputs: int) -> Tensor:
        """Returns some outputs in a row of the product: ``[..., outputs]``."""
        some = slice(first, first + outputs)
        y = Blocks(self.blocks.kind, self.blocks.raw[some]).product(x)
        return y if self.bias is None else y + self.bias[some]

    @property
    def weight(self) -> Tensor:
        """float32 ``[N, K]``: a copy."""
        return self.blocks.dense()

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, {self.blocks.kind}"
        )


class BlockEmbedding(InBlocks):
    """An embedding whose table stays in blocks; only rows that are looked up are dequantised."""

    def __init__(
        self, blocks: Blocks, dtype: torch.dtype = torch.float32, scale: float = 1.0
    ) -> None:
        """dtype: of what is looked up. scale: by which that is multiplied, as in Gemma 3."""
        super().__init__(blocks)
        self.dtype, self.scale = dtype, scale
        self.num_embeddings, self.embedding_dim = blocks.outputs, blocks.inputs

    def forward(self, ids: Tensor) -> Tensor:
        """ids: ``[...]`` -> ``[..., K]``."""
        dense = self.dequantized(self.blocks.rows(ids.reshape(-1))).to(self.dtype)
        if self.scale != 1.0:
            dense = dense * torch.tensor(self.scale).to(self.dtype)
        return dense.view(*ids.shape, self.embedding_dim)

    def dequantized(self, rows: Blocks) -> Tensor:
        """Returns what a few rows of blocks stand for, float32 ``[R, K]``."""
        return rows.dense()

    @property
    def weight(self) -> Tensor:
        """The table ``[V, K]``, not scaled: a copy."""
        return self.blocks.dense().to(self.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.blocks.kind}"


# -- float weights rounded to blocks of 4 bits -----------------------------------------------------


BLOCK = 32
"""Weights that share a scale and a smallest value."""

FOUR_BITS = "Q4_1"
"""The kind of their blocks."""

LEVELS = 15
"""The largest code."""

SHRUNK = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Shares of a block's range that are tried: a smaller one cuts off its ends and is finer inside."""

PIECE = 1 << 18
"""Weights that are rounded at once, so that what they need stays in the processor's cache."""


@torch.no_grad()
def to_four_bits(matrix: Tensor) -> Blocks:
    """Returns a float matrix ``[N, K]`` as blocks of 4 bits, its rows filled up with zeros.

    A weight is a code from 0 to 15 times the scale of its block, plus the block's smallest value,
    both float16. Of several ranges the one with the smallest square error is taken, each after one
    step of least squares. Raises ``UnsupportedModel`` for weights that are beyond the scales.
    """
    largest, most = float(matrix.abs().max()), torch.finfo(torch.float16).max
    if not largest <= most:
        raise UnsupportedModel(
            f"a layer has a weight of {largest:g}, and weights in 4 bits reach to {most:g} at "
            "most: use 'int8', or leave quantization out."
        )
    rows = max(1, PIECE // max(1, matrix.shape[1]))
    pieces = [_rounded(piece) for piece in torch.split(matrix.detach().float(), rows)]
    return Blocks(FOUR_BITS, torch.cat(pieces))


def _rounded(rows: Tensor) -> Tensor:
    """Returns the bytes of rows ``[R, K]``: uint8 ``[R, bytes of a row]``."""
    filled = torch.nn.functional.pad(rows, (0, -rows.shape[1] % BLOCK))
    weights = filled.view(len(rows), -1, BLOCK)  # [R, B, 32]
    low, high = weights.amin(-1, keepdim=True), weights.amax(-1, keepdim=True)
    best: tuple[Tensor, ...] | None = None  # error, codes, scale, smallest
    for share in SHRUNK:
        found = _tried(weights, (low + high) / 2, (high - low) * share)
        if best is None:
            best = found
        else:
            better = found[0] < best[0]
            best = tuple(torch.where(better, *pair) for pair in zip(found, best, strict=True))
    assert best is not None
    _, codes, scale, smallest = best
    small = codes.to(torch.uint8)
    packed = small[..., : BLOCK // 2] | small[..., BLOCK // 2 :] << 4
    numbers = torch.cat([scale, smallest], -1).half().view(torch.uint8)
    return torch.cat([numbers, packed], -1).reshape(len(rows), -1)


def _tried(weights: Tensor, middle: Tensor, width: Tensor) -> tuple[Tensor, ...]:
    """Returns the square error of blocks ``[R, B, 32]`` rounded within a range, the codes, the
    scales and the smallest values."""
    scale = (width / LEVELS).clamp_min(1e-7)
    codes = _codes(weights, scale, middle - width / 2)
    # The scale and the smallest value that suit these codes best.
    mean, mean_code = weights.mean(-1, keepdim=True), codes.mean(-1, keepdim=True)
    spread = (codes - mean_code).square().sum(-1, keepdim=True)
    slope = ((codes - mean_code) * (weights - mean)).sum(-1, keepdim=True) / spread.clamp_min(1e-6)
    scale = torch.where(spread > 0, slope, scale).half().float()
    smallest = (mean - scale * mean_code).half().float()
    codes = _codes(weights, scale, smallest)
    error = (codes * scale + smallest - weights).square().sum(-1, keepdim=True)
    return error, codes, scale, smallest


def _codes(weights: Tensor, scale: Tensor, smallest: Tensor) -> Tensor:
    return ((weights - smallest) / scale.clamp_min(1e-7)).round_().clamp_(0, LEVELS)
