"""DeepSeek's latent attention in heads (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outpace.heads.layers import AttentionContext, KeyValues, LayerConfig, Rotary, default_num_heads
from outpace.targets.hf.latent import DeepseekAttention


class LatentAttention(DeepseekAttention):
    """DeepSeek's attention: keys and values of an entry follow from one narrow state of it, which
    is what is kept."""

    def __init__(
        self, size: int, config: LayerConfig, inputs: int, latent: Mapping[str, Any]
    ) -> None:
        """inputs: their width. latent: the sizes, as transformers calls them."""
        heads = config.heads or default_num_heads(size)
        super().__init__(size, inputs, heads, latent, config.rope, config.norm_eps)
        self.heads, self.groups, self.head_dim = heads, heads, self.qk_head_dim
        self._rotary = Rotary(config.rope, self.qk_rope_head_dim)
        self._sizes = self.sizes()
        self.register_buffer("like", torch.empty(0), persistent=False)  # as of `Attention`

    like: Tensor

    def begin(self, rows: int) -> KeyValues:
        """Returns no entries of ``rows`` rows."""
        return KeyValues(*(self.like.new_empty(rows, n, 0, width) for n, width in self._sizes))

    def forward(self, x: Tensor, attn_context: AttentionContext) -> tuple[Tensor, KeyValues]:  # type: ignore[override]
        """As of `Attention`."""
        before = (attn_context.before.keys, attn_context.before.values)
        position_embeddings = self._rotary(attn_context.positions, x.dtype)
        found, keys, values = self.attend(x, position_embeddings, before, attn_context.visible)
        return found, KeyValues(keys, values)
