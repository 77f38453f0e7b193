"""DeepSeek's latent attention, as transformers has it, for heads that attend in this way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from outpace.targets.hf.attention import to_attention_mask
from outpace.targets.hf.nextn import EntryCache

DERIVED = ("inv_freq", "attention_factor")
"""Entries of rotary positions that follow from the others."""


class DeepseekAttention(DeepseekV3Attention):
    """Attention whose keys and values are kept as one latent state of each entry."""

    def __init__(
        self,
        size: int,
        inputs: int,
        heads: int,
        sizes: Mapping[str, Any],
        rope: Mapping[str, Any],
        eps: float,
    ) -> None:
        """size: the width of its outputs; inputs: that of its inputs. sizes: ``q_lora_rank`` and so
        on, as in transformers. eps: of its norms."""
        make: Any = DeepseekV3Config
        config = make(
            hidden_size=inputs,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            rope_parameters={name: each for name, each in rope.items() if name not in DERIVED},
            attn_implementation="sdpa",
            **sizes,
        )
        super().__init__(config, 0)
        self.o_proj = nn.Linear(heads * sizes["v_head_dim"], size, bias=False)
        # transformers has 1e-6 there whatever the configuration says, and other code its own.
        parts: Any = self
        if self.q_lora_rank is not None:
            parts.q_a_layernorm = nn.RMSNorm(self.q_lora_rank, eps=eps)
        parts.kv_a_layernorm = nn.RMSNorm(self.kv_lora_rank, eps=eps)

    def attend(
        self,
        x: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        before: tuple[Tensor, Tensor],
        visible: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the outputs ``[B, W, H]``, and both parts of the new entries, ``[B, 1, W, D]``.

        x: ``[B, W, inputs]``; position_embeddings: cosines and sines, ``[B, W, D]``; before: the
        two parts of the entries before; visible: ``[B, W, L + W]`` bool.
        """
        cache: Any = EntryCache(dict(zip(((0, "keys"), (0, "values")), before, strict=True)))
        mask = to_attention_mask(visible, "sdpa", x.dtype)
        found: Tensor = super().forward(x, position_embeddings, mask, cache)[0]
        return found, cache.new[0, "keys"], cache.new[0, "values"]

    @torch.no_grad()
    def sizes(self) -> list[tuple[int, int]]:
        """Returns groups and width of both parts of an entry, which versions of transformers keep
        in other forms."""
        cache: Any = EntryCache({})
        x = self.o_proj.weight.new_zeros(1, 1, self.kv_a_proj_with_mqa.in_features)
        zeros = x.new_zeros(1, 1, self.qk_rope_head_dim)
        super().forward(x, (zeros, zeros), None, cache)
        return [(part.shape[1], part.shape[3]) for part in cache.new.values()]
