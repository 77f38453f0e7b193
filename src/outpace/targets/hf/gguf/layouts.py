"""How llama.cpp lays out the weights of families that transformers' own functions leave out.

A layout says which tensors of a file a weight of the model is, where the library's table of names
does not, and turns a tensor into the layout that the model has. What llama.cpp's converter does to
a weight is undone here.
"""

from __future__ import annotations

import re
from typing import Any

from transformers.modeling_gguf_pytorch_utils import (
    GGUFTensor,
    LlamaTensorProcessor,
    Qwen2MoeTensorProcessor,
)

_LLAMA: Any = LlamaTensorProcessor

PLACES = (
    (
        r"model\.layers\.(\d+)\.\w+\.experts\.gate_up_proj",
        ("blk.{}.ffn_gate_exps.weight", "blk.{}.ffn_up_exps.weight"),
    ),
    (r"model\.layers\.(\d+)\.\w+\.experts\.down_proj", ("blk.{}.ffn_down_exps.weight",)),
)
"""Weights by patterns of their names, and the tensors that each of them is put together from."""


class Layout(Qwen2MoeTensorProcessor):
    """The layout of one family's weights, with the experts of a mixture in one tensor for each
    of their three matrices."""

    def __init__(
        self,
        config: Any = None,
        *,
        permuted: bool = False,
        grouped: bool = False,
        offset: float = 0.0,
    ) -> None:
        """permuted: whether the rows of queries and keys are in Llama's order. grouped: whether the
        model holds query, key and value of each head side by side, which a file holds apart.
        offset: what the converter adds to the weights of norms.
        """
        self.config = config or {}
        self.permuted, self.grouped, self.offset = permuted, grouped, offset

    def places(self, weight: str) -> list[str]:
        """Returns the tensors that make up a weight, empty where the table of names knows."""
        for pattern, tensors in PLACES:
            found = re.fullmatch(pattern, weight)
            if found is not None:
                return [tensor.format(*found.groups()) for tensor in tensors]
        return []

    def process(self, weights: Any, name: str, **more: Any) -> Any:
        """Returns a tensor as the model holds it, as transformers' own functions do."""
        if self.permuted and (".attn_q." in name or ".attn_k." in name):
            return _LLAMA(self.config).process(weights, name, **more)
        if self.grouped and ".attn_qkv." in name:
            heads = self.config.get("num_attention_heads") or self.config["n_head"]
            apart = weights.reshape(3, heads, -1, *weights.shape[1:])  # [3, H, D, ...]
            return GGUFTensor(apart.swapaxes(0, 1).reshape(weights.shape), name, {})
        if self.offset and name.endswith("norm.weight"):
            return GGUFTensor(weights - self.offset, name, {})
        return super().process(weights, name, **more)
