"""Matrix products that read the weights once for a handful of rows, on a CPU.

Speculation pays where scoring a few tokens costs what one costs. MKL's product breaks that promise:
it takes three rows at a time and reads the whole weight again for every three. The same plain
weight, seen as N / 32 blocks of 32 outputs and multiplied as a batch, is read once for up to twelve
rows, because a block stays in the cache while it meets all of them. No weight is copied or packed.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

Kernels = Literal["auto", "off"]

BLOCK = 32
"""Outputs per block: 16 to 64 do alike; 32 x 4096 float32 weights fill half of a core's cache."""

PLAIN_ROWS = 3
"""Rows that the plain product takes in one reading of the weight."""

BLOCKED_ROWS = 12
"""Rows up to which blocks win. From 16 on MKL leaves its small kernels and is many times slower."""

WIDE_ROWS = 128
"""Rows up to which it pays to hand over the activations transposed."""


SMALLEST = 1 << 20
"""Weights (elements) from which exchanging a layer pays: smaller ones stay in the cache anyway, and
the few more operations of a blocked product then cost more than the second reading."""


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


class _RowConv1D(RowLinear):
    """GPT-2's layer: its parameter stays ``[K, N]``, over memory that now holds ``[N, K]``."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        weight.data = weight.data.t().contiguous().t()
        super().__init__(weight, bias)

    def _matrix(self) -> Tensor:
        return self.weight.t()


def speed_up(model: nn.Module, kernels: Kernels = "auto", smallest: int = SMALLEST) -> int:
    """Exchanges the larger linear layers of a model for `RowLinear`, in place; returns how many.

    None where it does not pay: off a CPU, in other dtypes than float32, or without MKL. Parameters
    stay the same objects under the same names, so that tied embeddings stay tied and ``state_dict``
    does not change.
    """
    has_mkl: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    if kernels == "off" or not has_mkl:
        return 0
    exchanged = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            fast = _fast(child, smallest)
            if fast is not None:
                setattr(parent, name, fast.train(child.training))
                exchanged += 1
    return exchanged


def _fast(module: Any, smallest: int) -> RowLinear | None:
    # Subclasses and hooked modules do more than a product.
    if type(module) is nn.Linear and _suits(module, smallest):
        return RowLinear(cast(nn.Parameter, module.weight), module.bias)
    if type(module) is Conv1D and _suits(module, smallest):
        return _RowConv1D(module.weight, module.bias)
    return None


def _suits(module: Any, smallest: int) -> bool:
    weight = module.weight
    plain = (
        weight.numel() >= smallest and weight.device.type == "cpu" and weight.dtype == torch.float32
    )
    return bool(plain and not module._forward_hooks and not module._forward_pre_hooks)
