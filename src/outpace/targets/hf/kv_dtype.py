"""Keys and values in 8 bits.

Each vector, the key or the value of one head in one slot, is rounded when it is written, by itself
and with a scale of its own. So it is the same alone and in any batch, drafted and committed, and no
text depends on what else was computed. Attention reads what was rounded, of the columns of its own
pass, too: what is drafted is scored as it will be read later. Scales like these are vLLM's
"per-token-head" ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.targets.base import KVCacheDtype


@dataclass(frozen=True)
class KVQuantization:
    """Numbers of 8 bits, times the scale of their vector."""

    number: int
    """The number of the kind in `kv_cache.h`."""
    dtype: torch.dtype
    largest: float

    def rounded(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Returns vectors ``[..., D]`` as numbers of 8 bits, held as int8, and the scale of each,
        ``[..., 1]``, in the dtype of the vectors. One with a number that is not finite becomes one
        without a number."""
        wide = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
        scales = (wide.abs().amax(-1, keepdim=True) / self.largest).to(vectors.dtype)
        shares = wide / scales.where(scales > 0, 1).to(wide.dtype)
        shares = shares.clamp(-self.largest, self.largest)  # a scale is rounded, too
        whole = shares.round() if self.dtype == torch.int8 else shares
        return whole.to(self.dtype).view(torch.int8), scales

    def dequantized(self, numbers: Tensor, scales: Tensor) -> Tensor:
        """Returns what `rounded` has left of vectors, in the dtype of their scales."""
        return numbers.view(self.dtype).to(scales.dtype) * scales


EIGHT_BITS: Mapping[KVCacheDtype, KVQuantization | None] = {
    "auto": None,
    "int8": KVQuantization(1, torch.int8, 127.0),
    "fp8": KVQuantization(2, torch.float8_e4m3fn, 448.0),
}
"""By `KVCacheDtype`; None: the dtype of the model."""
