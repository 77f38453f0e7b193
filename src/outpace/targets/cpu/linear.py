"""Matrix products that read the weights once for a handful of rows, on a CPU.

Speculation pays where scoring a few tokens costs what one costs. MKL's product breaks that promise:
it takes three rows at a time and reads the whole weight again for every three. The same plain
weight, seen as N / 32 blocks of 32 outputs and multiplied as a batch, is read once for up to twelve
rows, because a block stays in the cache while it meets all of them. No weight is copied or packed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

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
