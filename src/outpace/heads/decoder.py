"""Whole decoder layers of heads.

The parts are named as in transformers' Llama and Qwen3, and so in the published checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from outpace.heads.layers import (
    Attention,
    AttentionContext,
    KeyValues,
    LayerConfig,
    RMSNorm,
    normalised,
)
from outpace.targets.cpu.native_layers.product import FusedProduct, NativeProduct

if TYPE_CHECKING:
    from outpace.heads.latent import LatentAttention


class FeedForward(nn.Module):
    """Llama's gated feed-forward part."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: ``[..., H]`` -> the same shape."""
        found: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return found


class DecoderLayer(nn.Module):
    """A whole layer: attention and feed-forward part, each of the normalised input."""

    def __init__(
        self,
        size: int,
        config: LayerConfig,
        *,
        input_norm: bool = True,
        bias: bool = False,
        output_bias: bool = False,
        normed: bool = False,
        window: int = 0,
    ) -> None:
        """input_norm: whether attention reads its input normalised. The others: as in
        `Attention`."""
        super().__init__()
        eps = config.norm_eps
        self.input_layernorm = RMSNorm(size, eps=eps) if input_norm else None
        self.self_attn = Attention(
            size, config, bias=bias, output_bias=output_bias, normed=normed, window=window
        )
        self.post_attention_layernorm = RMSNorm(size, eps=eps)
        self.mlp = FeedForward(size, config.inner_size or 3 * size)

    def begin(self, rows: int) -> KeyValues:
        """Returns no entries of ``rows`` rows."""
        return self.self_attn.begin(rows)

    def entries(self, x: Tensor, positions: Tensor) -> KeyValues:
        """Returns the keys and values of inputs ``[B, W, H]``, without what the layer makes of
        them."""
        return self.self_attn.entries(normalised(x, self.input_layernorm), positions)

    def forward(self, x: Tensor, attn_context: AttentionContext) -> tuple[Tensor, KeyValues]:
        """x: ``[B, W, H]`` -> the same shape, and the keys and values of these."""
        attended, entries = self.self_attn(normalised(x, self.input_layernorm), attn_context)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), entries


class NormedLayer(DecoderLayer):
    """A layer with a norm after it."""

    def __init__(self, size: int, config: LayerConfig) -> None:
        super().__init__(size, config)
        self.norm = RMSNorm(size, eps=config.norm_eps)

    def forward(self, x: Tensor, attn_context: AttentionContext) -> tuple[Tensor, KeyValues]:
        found, entries = super().forward(x, attn_context)
        return self.norm(found), entries


class MidLayer(nn.Module):
    """A layer whose attention reads a token's embedding and a state, each normalised, side by side,
    as the first one of EAGLE-3 does."""

    def __init__(
        self,
        size: int,
        config: LayerConfig,
        attention: Attention | LatentAttention,
        norm_first: bool,
    ) -> None:
        """attention: of inputs of twice the width. norm_first: whether what the layer does is added
        to the normalised state, and not to the state."""
        super().__init__()
        self.input_layernorm = RMSNorm(size, eps=config.norm_eps)
        self.hidden_norm = RMSNorm(size, eps=config.norm_eps)
        self.self_attn = attention
        self.norm_first = norm_first
        self.post_attention_layernorm = RMSNorm(size, eps=config.norm_eps)
        self.mlp = FeedForward(size, config.inner_size or 3 * size)

    def begin(self, rows: int) -> KeyValues:
        """Returns no entries of ``rows`` rows."""
        return self.self_attn.begin(rows)

    def forward(
        self, x: Tensor, attn_context: AttentionContext, embeddings: Tensor
    ) -> tuple[Tensor, KeyValues]:
        """x, embeddings: ``[B, W, H]`` -> the same shape, and the keys and values of these."""
        normed = self.hidden_norm(x)
        seen = torch.cat([self.input_layernorm(embeddings), normed], -1)
        attended, entries = self.self_attn(seen, attn_context)
        state = (normed if self.norm_first else x) + attended
        return state + self.mlp(self.post_attention_layernorm(state)), entries


def merge_projections(head: nn.Module) -> None:
    """Lets products of a head's layers that have the same input be computed together, where they
    are our own: queries, keys and values, and both that a feed-forward part begins with."""
    for module in head.modules():
        if isinstance(module, Attention):
            group = [module.q_proj, module.k_proj, module.v_proj]
        elif isinstance(module, FeedForward):
            group = [module.gate_proj, module.up_proj]
        else:
            continue
        own = [each for each in group if isinstance(each, NativeProduct)]
        if len(own) == len(group) and len({each.read.dtype for each in own}) == 1:
            fused = FusedProduct(own[0].library, own)
            for each in own:
                each.share(fused)
