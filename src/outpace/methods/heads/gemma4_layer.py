"""Gemma 4's decoder layer, of which DeepSpec's blocks for that model are made (DeepSpec 2026)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, rms_norm

from outpace.heads.decoder import DecoderLayer, FeedForward
from outpace.heads.layers import Attention, AttentionContext, KeyValues, LayerConfig, RMSNorm

SUPPORTED_VALUES: Mapping[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "enable_moe_block": False,
    "hidden_size_per_layer_input": 0,
}
"""Entries by which layers that are built otherwise, and cannot be read, are recognised."""


class Gemma4Attention(Attention):
    """Normalises values, too, and does not scale scores."""

    scale = 1.0

    def __init__(self, size: int, config: LayerConfig, shared_values: bool) -> None:
        """shared_values: whether values are made by the matrix that makes keys."""
        super().__init__(size, config, normed=True)
        self._eps = config.norm_eps
        if shared_values:
            self.v_proj = cast(nn.Linear, None)

    def _entries(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> KeyValues:
        found = super()._entries(x, position_embeddings)
        return KeyValues(found.keys, rms_norm(found.values, (self.head_dim,), eps=self._eps))

    def _values(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.k_proj(x) if self.v_proj is None else self.v_proj(x))


class GatedGelu(FeedForward):
    """Gemma's gated feed-forward part."""

    def forward(self, x: Tensor) -> Tensor:
        gate = gelu(self.gate_proj(x), approximate="tanh")
        return cast(Tensor, self.down_proj(gate * self.up_proj(x)))


class Gemma4Layer(DecoderLayer):
    """Norms before and after both parts, and one number for all that comes out."""

    def __init__(self, size: int, config: LayerConfig, shared_values: bool) -> None:
        super().__init__(size, config, normed=True)
        self.self_attn = Gemma4Attention(size, config, shared_values)
        self.mlp = GatedGelu(size, config.inner_size or 3 * size)
        self.pre_feedforward_layernorm = RMSNorm(size, eps=config.norm_eps)
        self.post_feedforward_layernorm = RMSNorm(size, eps=config.norm_eps)
        self.register_buffer("layer_scalar", torch.ones(1))

    layer_scalar: Tensor

    def forward(self, x: Tensor, attn_context: AttentionContext) -> tuple[Tensor, KeyValues]:
        """As of `DecoderLayer`."""
        attended, entries = self.self_attn(cast(nn.Module, self.input_layernorm)(x), attn_context)
        x = x + self.post_attention_layernorm(attended)
        made = self.mlp(self.pre_feedforward_layernorm(x))
        x = (x + self.post_feedforward_layernorm(made)) * self.layer_scalar
        return x, entries
