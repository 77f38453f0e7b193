"""Multi-head latent attention, as `latent_attention.h` follows it: read from transformers' modules.

DeepSeek V2 and V3 have it, GLM 4.7 Flash, Kimi K2 and others (DeepSeek-V2, arXiv:2405.04434). The
cache holds a latent for each token, which the keys and values of all heads are made from, and one
key that is rotated to the token's position. transformers makes the keys and values of all slots
anew in each pass; the library lets queries attend to the latents.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from outpace.targets.cpu.native_layers.probing import Norm, norm_of
from outpace.targets.cpu.weights.latents import BlockLatents

MOST_NOPE = 256
"""Numbers of a query's head without a position (`transposed_products.h`)."""

MOST_ROPE = 256
"""Numbers with one (`ops.h`)."""

TOGETHER = 8
"""Heads that go through the slots together, at most: others go on other threads."""


class LatentStruct(ctypes.Structure):
    """`Latent` of `layer.h`, field by field."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("size", "nope", "rope", "value"))


class Latent(NamedTuple):
    """The sizes of such attention."""

    size: int
    """Numbers of a latent."""
    nope: int
    """Numbers of a query's head without a position; those with one come after them."""
    rope: int
    value: int
    heads: int

    @property
    def query(self) -> int:
        """Numbers of a query's head."""
        return self.nope + self.rope

    @property
    def each(self) -> int:
        """Heads that go through the slots together."""
        return max(each for each in range(1, TOGETHER + 1) if self.heads % each == 0)

    def struct(self) -> LatentStruct:
        """Returns the sizes as the library reads them."""
        return LatentStruct(*self[:4])

    def fits(self, lanes: int) -> bool:
        """Whether the library can compute with these sizes."""
        return (
            all(number > 0 for number in self)
            and all(number % lanes == 0 for number in (self.size, self.rope))
            and self.nope <= MOST_NOPE
            and self.rope <= min(MOST_ROPE, self.size)
        )


class LatentParts(NamedTuple):
    """The modules of latent attention."""

    sizes: Latent
    q_a: Any
    """None: queries are made of hidden states."""
    q_b: Any
    """Makes queries, of what `q_a` has made or of hidden states."""
    kv_a: Any
    """Makes latents, and the shared key after each."""
    v_b: Any
    """Makes each head's value of latents; where `k_b` is None, its key first."""
    output: Any
    k_b: Any
    """Makes each head's key, the other way round; None: the same layer as `v_b`."""
    query_norm: Norm | None
    """The norm of what `q_a` makes."""
    latent_norm: Norm


BOTH = "kv_b_proj"
"""What transformers' layer is called that makes keys and values."""

SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_heads")


def latent_of(attention: Any) -> LatentParts | None:
    """Returns the parts of an attention whose cache holds latents; None for others, and where a
    norm is of an unknown kind. Before transformers kept latents, it had no method for them."""
    sizes: list[Any] = [getattr(attention, name, None) for name in SIZES]
    if not hasattr(attention, "expand_kv") or not all(isinstance(each, int) for each in sizes):
        return None
    parts: dict[str, Any] = dict(attention.named_children())
    first, values = parts.get("q_a_proj"), parts.get(BOTH)
    query = parts.get("q_proj" if first is None else "q_b_proj")
    latent, output, keys = parts.get("kv_a_proj_with_mqa"), parts.get("o_proj"), None
    if isinstance(values, BlockLatents):
        keys, values = values.keys, values.values
    query_norm, latent_norm = (
        norm_of(parts[name]) if name in parts else None
        for name in ("q_a_layernorm", "kv_a_layernorm")
    )
    known = None not in (query, latent, values, output)
    if not known or latent_norm is None or (first is None) != (query_norm is None):
        return None
    linears = first, query, latent, values, output, keys
    return LatentParts(Latent(*sizes), *linears, query_norm, latent_norm)
