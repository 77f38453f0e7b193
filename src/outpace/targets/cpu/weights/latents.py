"""The projection of latents to keys and values (`kv_b_proj`), where a file holds its two parts
separately, in quantised blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from outpace.targets.cpu.weights.layers import OnDemandWeight


class BlockLatents(nn.Module):
    """Stands for transformers' layer that makes each head's key, and its value after that, of
    latents of K numbers (`kv_b_proj`). Its own layers are ``keys``, the other way round, ``[H K,
    N]``, so that queries meet latents, and ``values``, ``[H V, K]``.

    ``weight`` and ``state_dict`` show transformers' weight, dequantised, anew each time.
    """

    bias = None

    def __init__(self, attention: Any) -> None:
        """attention: transformers' module, which is built without storage."""
        super().__init__()
        self.out_features, self.in_features = attention.kv_b_proj.weight.shape
        self.heads: int = attention.num_heads
        nope, value = attention.qk_nope_head_dim, attention.v_head_dim
        with torch.device("meta"):
            self.keys: Any = nn.Linear(nope, self.heads * self.in_features, bias=False)
            self.values: Any = nn.Linear(self.in_features, self.heads * value, bias=False)
        self.to(attention.kv_b_proj.weight.dtype).requires_grad_(False)

    def forward(self, latents: Tensor) -> Tensor:
        """``[..., K]`` -> ``[..., H (N + V)]``."""
        return functional.linear(latents, self.weight.to(latents))

    @property
    def weight(self) -> Tensor:
        """``[H (N + V), K]``: a copy."""
        keys = self.keys.weight.view(self.heads, self.in_features, -1).transpose(1, 2)
        values = self.values.weight.view(self.heads, -1, self.in_features)
        return torch.cat([keys, values], 1).flatten(0, 1)

    def dequantized(self, dtype: torch.dtype) -> nn.Linear:
        """Returns transformers' layer with the weight as numbers."""
        plain = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        plain.weight = nn.Parameter(self.weight.to(dtype), requires_grad=False)
        return plain.train(self.training)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", **how: Any) -> Any:
        """Returns the weight under the name of transformers' layer, once it is in blocks."""
        if not isinstance(self.keys, OnDemandWeight):
            return super().state_dict(*args, destination=destination, prefix=prefix, **how)
        found = {} if destination is None else destination
        found[f"{prefix}weight"] = self.weight
        return found
