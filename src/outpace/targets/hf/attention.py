"""Attention for grouped queries (several query heads share a key head) without copies of keys, and
masks in the form that attention functions take.

When there is a mask, transformers repeats keys and values once for every query head before it calls
torch's kernel: each layer copies all that is cached, in every pass that scores a draft. Here the
queries that share a key head are laid one after another instead, as more queries of that head.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "sdpa_grouped"
"""What the configuration of a model calls this attention."""

BOOLEAN = frozenset({"sdpa", NAME})
"""Attention functions that take masks as booleans."""

INDEXED_LAYERS = frozenset({"indexed_attention", "deepseek_sparse_attention", "minimax_m3_sparse"})
"""Layers in which an indexer picks what attention sees: only for attention functions that their
code knows by name its choice is put into the mask. The second is the first's older name."""

ELSEWHERE = ("position_bias", "softcap", "cache")
"""Arguments that only transformers' own function understands."""

WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Torch's attention kernels on a GPU, but for cuDNN's. That one makes a plan for each new number of
tokens, which takes longer than many passes, and a text has another number in every round."""


def sdpa_backends_for(device: torch.device) -> AbstractContextManager[Any]:
    """Returns what lets passes on a device use only kernels that suit texts that grow."""
    return sdpa_kernel(WITHOUT_PLANS) if device.type == "cuda" else nullcontext()


def attention_for(config: Any) -> str | None:
    """Returns the name of the attention function that a configuration needs, None for any."""
    # Soft-capped attention scores exist in the eager kernel only; elsewhere transformers picks the
    # fastest of those that the model supports.
    return "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else None


def use_grouped(model: nn.Module) -> bool:
    """Makes a model with grouped queries use `grouped_attention`; returns whether it now does."""
    loaded: Any = model
    config = loaded.config.get_text_config()
    heads = getattr(config, "num_attention_heads", 1)
    grouped = (num_kv_heads(config) or heads) < heads
    if not (grouped and config._attn_implementation == "sdpa"):
        return False
    if INDEXED_LAYERS.intersection(getattr(config, "layer_types", None) or ()):
        return False
    if not (loaded._supports_attention_backend and loaded._can_set_attn_implementation()):
        return False
    loaded.outpace_attention = _register()
    loaded.set_attn_implementation(NAME)
    return True


def num_kv_heads(config: Any) -> int | None:
    """Returns how many key heads most layers have, None where a configuration does not say. One
    whose layers differ, such as Gemma 4's, is not asked by attribute, which it forbids."""
    name = "num_key_value_heads"
    known = config.to_dict()
    found: int | None = known[name] if name in known else getattr(config, name, None)
    return found


class _Registration:
    """Part of a model that uses the attention: unpickling it registers the attention there."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _register, ()


def _register() -> _Registration:
    """Makes the attention known to transformers in this process."""
    AttentionInterface.register(NAME, grouped_attention)
    # For a prompt the model makes its own masks: in the form that torch's kernel takes.
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return _Registration()


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Returns the attended values ``[B, T, H, D]``, and None for the attention weights.

    query: ``[B, H, T, D]``; key, value: ``[B, G, S, D]`` with G dividing H; attention_mask:
    ``[B, 1, T, S]``. Without a mask, without groups, or with options that only transformers'
    function has, that function is called.
    """
    rows, heads, columns, _ = query.shape
    groups = key.shape[1]
    shared = attention_mask is not None and attention_mask.shape[1] == 1
    if not shared or heads == groups or any(options.get(name) is not None for name in ELSEWHERE):
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return found
    assert attention_mask is not None
    each = heads // groups
    below = query.reshape(rows, groups, each * columns, -1)
    mask = attention_mask.expand(rows, each, columns, -1).reshape(rows, 1, each * columns, -1)
    seen = scaled_dot_product_attention(
        below, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
    )
    return seen.reshape(rows, heads, columns, -1).transpose(1, 2).contiguous(), None


def to_attention_mask(seen: Tensor, attn_implementation: str, dtype: torch.dtype) -> Tensor:
    """Returns a mask as an attention function takes it, ``[A, 1, T, S]``.

    seen: ``[A, T, S]`` bool. The result is of booleans, or else of numbers in the model's dtype,
    which are added to the attention scores.
    """
    mask = seen[:, None]
    if attn_implementation in BOOLEAN:
        return mask
    zero = torch.zeros((), dtype=dtype, device=seen.device)
    return torch.where(mask, zero, torch.finfo(dtype).min)


def apply_window(visible: Tensor, window: int) -> Tensor:
    """Returns those of the visible entries ``[B, W, L]`` that are in a window. What an entry sees
    is its text, what was drafted on its way, and itself, one at each position and in that order:
    the last ones are the nearest."""
    if not window or visible.shape[-1] <= window:
        return visible
    return visible & (visible.flip(-1).cumsum(-1).flip(-1) <= window)
