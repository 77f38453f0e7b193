"""Linear layers on a CPU whose weights are held in the order that oneDNN's products read."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outpace.targets.cpu.opaque import opaque
from outpace.targets.cpu.weights.held import LaidOut, ShowsWeight

HINT = 8
"""Rows that the layout is made for: with it the product was as fast as any at 1 to 512 rows."""

DTYPES = frozenset({torch.float32, torch.bfloat16})


def available(dtype: torch.dtype = torch.float32) -> bool:
    """Whether weights can be packed here: this build of torch can, and the processor."""
    has: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not (has and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.ones(16, 16, dtype=dtype), HINT)
    except RuntimeError:  # narrow types need instructions that not every processor has
        return False
    return True


def dtypes() -> frozenset[torch.dtype]:
    """Returns the types of weights that can be packed here."""
    return frozenset(filter(available, DTYPES))


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns oneDNN's product ``[..., N]`` of x ``[..., K]`` with a weight ``[N, K]``, packed or
    plain."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


def _packed(weight: Tensor) -> Tensor:
    """Returns a weight ``[N, K]`` in oneDNN's layout, in which only its products can read it."""
    found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, HINT)
    return found


def _shape(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0])


class PackedLinear(LaidOut, ShowsWeight):
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
        self.lay_out(weight.detach())

    def lay_out(self, plain: Tensor) -> None:
        """Takes over a plain weight ``[N, K]``, which is not kept."""
        self._packed = _packed(plain)
        self._compilable = opaque("packed_linear", product, _shape)

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
        multiply = self._compilable if torch.compiler.is_compiling() else product
        result: Tensor = multiply(x, self._packed, self.bias)
        return result

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"
