"""Linear layers on other libraries' products: MKL's in blocks, and oneDNN's of packed weights.

Matrix products that read the weights once for a handful of rows, on a CPU.

Speculation pays where scoring a few tokens costs what one costs. MKL's product breaks that promise:
it takes three rows at a time and reads the whole weight again for every three. The same plain
weight, seen as N / 32 blocks of 32 outputs and multiplied as a batch, is read once for up to twelve
rows, because a block stays in the cache while it meets all of them. No weight is copied or packed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from outpace.targets.cpu.weights.layers import OnDemandWeight, PrepackedModule

BLOCK = 32
"""Outputs per block: 16 to 64 do alike; 32 x 4096 float32 weights fill half of a core's cache."""

PLAIN_ROWS = 3
"""Rows that the plain product takes in one reading of the weight."""

BLOCKED_ROWS = 12
"""Rows up to which blocks win. From 16 on MKL leaves its small kernels and is many times slower."""

WIDE_ROWS = 128
"""Rows up to which it pays to hand over the activations transposed."""


class RowLinear(nn.Linear):
    """A linear layer, fast for 1 to 16 rows: the same parameters, another order of reading them.

    The result is that of ``nn.Linear`` up to rounding.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        nn.Module.__init__(self)  # not nn.Linear's, which would make parameters of its own
        self.weight = weight
        self.bias = bias  # type: ignore[assignment]
        self.out_features, self.in_features = self._matrix().shape

    def _matrix(self) -> Tensor:
        """``[N, K]``, contiguous."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        """x: ``[..., K]`` -> ``[..., N]``."""
        rows = x.numel() // x.shape[-1]
        if rows <= PLAIN_ROWS or rows > WIDE_ROWS:
            return linear(x, self._matrix(), self.bias)
        flat = x.reshape(rows, -1)
        y = self._blocked(flat) if rows <= BLOCKED_ROWS else self._wide(flat)
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], -1)

    def _blocked(self, x: Tensor) -> Tensor:
        """``[rows, N]``, each block of outputs a product of its own."""
        weight = self._matrix()
        outputs, inputs = weight.shape
        whole = outputs // BLOCK * BLOCK
        rest = weight[whole:] if whole < outputs else None
        # Viewed anew in every call: a view that was kept would outlive a move of the weight.
        blocks = weight[:whole].view(-1, BLOCK, inputs).transpose(1, 2)  # [N/32, K, 32]
        y = torch.bmm(x.expand(blocks.shape[0], -1, -1), blocks)
        y = y.transpose(0, 1).reshape(x.shape[0], whole)
        return y if rest is None else torch.cat([y, linear(x, rest)], 1)

    def _wide(self, x: Tensor) -> Tensor:
        return (self._matrix() @ x.t().contiguous()).t().contiguous()


class RowConv1D(RowLinear):
    """GPT-2's layer: its parameter stays ``[K, N]``, over memory that now holds ``[N, K]``."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        weight.data = weight.data.t().contiguous().t()
        super().__init__(weight, bias)

    def _matrix(self) -> Tensor:
        return self.weight.t()


@cache
def as_custom_op(
    name: str, product: Callable[..., Any], shape: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns a function as an operator ``outpace::name``, for use inside compiled code only.

    torch's compiler takes its own packed products for constants of the graph, and fails where they
    are not. shape: the same arguments to an empty tensor of the result's shape.
    """
    operator = torch.library.custom_op(f"outpace::{name}", product, mutates_args=())
    operator.register_fake(shape)
    return operator


# -- oneDNN's products of packed weights -----------------------------------------------------------


PACKED_FOR = 8
"""Rows that the layout is made for: with it the product was as fast as any at 1 to 512 rows."""

PACKABLE = frozenset({torch.float32, torch.bfloat16})


def can_pack(dtype: torch.dtype = torch.float32) -> bool:
    """Whether weights can be packed here: this build of torch can, and the processor."""
    has: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not (has and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.ones(16, 16, dtype=dtype), PACKED_FOR)
    except RuntimeError:  # narrow types need instructions that not every processor has
        return False
    return True


def packable_dtypes() -> frozenset[torch.dtype]:
    """Returns the types of weights that can be packed here."""
    return frozenset(filter(can_pack, PACKABLE))


def packed_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns oneDNN's product ``[..., N]`` of x ``[..., K]`` with a weight ``[N, K]``, `packed`
    or plain."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


def packed(weight: Tensor) -> Tensor:
    """Returns a weight ``[N, K]`` in oneDNN's layout, in which only its products can read it."""
    found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR)
    return found


def _empty_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns an empty tensor of the shape of `packed_product`, for compiled code."""
    return x.new_empty(*x.shape[:-1], weight.shape[0])


class PackedLinear(PrepackedModule, OnDemandWeight):
    """A linear layer that keeps its weight in oneDNN's layout only, and so in one copy.

    A row of the result is the same to the last bit whatever other rows share the pass. ``weight``
    and ``state_dict`` show the plain weight, unpacked anew each time.
    """

    def __init__(self, weight: Tensor, bias: nn.Parameter | None, shown_t: bool = False) -> None:
        """weight: ``[N, K]``; not kept. shown_t: ``weight`` is to look transposed, as GPT-2's."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self._dtype = weight.dtype
        self._shown_t = shown_t
        self.prepack(weight.detach())

    def prepack(self, plain: Tensor) -> None:
        """Takes over a plain weight ``[N, K]``, which is not kept."""
        self._packed = packed(plain)
        self._compilable = as_custom_op("packed_linear", packed_product, _empty_product)

    def plain(self) -> Tensor:
        """Returns the plain weight ``[N, K]``: a copy."""
        return self._packed.to_dense(self._dtype)

    @property
    def weight(self) -> Tensor:
        """``[N, K]``, or ``[K, N]`` where it looks transposed: a plain copy."""
        plain = self.plain()
        return plain.t().contiguous() if self._shown_t else plain

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weight, which is no parameter."""
        return self.out_features * self.in_features * self._dtype.itemsize

    def forward(self, x: Tensor) -> Tensor:
        """x: ``[..., K]`` -> ``[..., N]``."""
        multiply = self._compilable if torch.compiler.is_compiling() else packed_product
        result: Tensor = multiply(x, self._packed, self.bias)
        return result

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"
