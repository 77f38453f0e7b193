"""The layers of heads that are small decoders: attention, norms, rotary embeddings.

The parts are named as in transformers' Llama and Qwen3, and so in the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from outpace.core.transfer import power_of_two
from outpace.heads.base import HeadConfig
from outpace.targets.hf.attention import apply_window

DEFAULT_ROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True, eq=False)
class KeyValues:
    """Keys and values of L entries of B rows."""

    keys: Tensor  # [B, G, L, D], of G groups of attention heads
    values: Tensor  # [B, G, L, D]

    def __len__(self) -> int:
        return self.keys.shape[2]

    def then(self, more: KeyValues) -> KeyValues:
        """Returns these and further ones."""
        return KeyValues(
            torch.cat([self.keys, more.keys], 2), torch.cat([self.values, more.values], 2)
        )

    @classmethod
    def join_layers(cls, layers: Sequence[KeyValues]) -> KeyValues:
        """Returns the entries of several layers side by side, as if they were groups of one."""
        if len(layers) == 1:
            return layers[0]
        return cls(
            torch.cat([each.keys for each in layers], 1),
            torch.cat([each.values for each in layers], 1),
        )

    def split_layers(self, layers: int) -> list[KeyValues]:
        """Returns the entries of each layer, which `join_layers` has put side by side."""
        parts = zip(self.keys.chunk(layers, 1), self.values.chunk(layers, 1), strict=True)
        return [KeyValues(keys, values) for keys, values in parts]


@dataclass(frozen=True, eq=False)
class AttentionContext:
    """Where W entries of B rows stand, and which ones they attend to."""

    positions: Tensor  # [B, W], their numbers in their texts, from 0
    before: KeyValues  # L of each row
    visible: Tensor  # [B, W, L + W] bool: of those before and of the W themselves, itself at least

    def through(
        self, layers: Sequence[nn.Module], x: Tensor, embeddings: Tensor | None = None
    ) -> tuple[Tensor, KeyValues]:
        """Returns what decoder layers make of states ``[B, W, H]``, one after another, and their
        entries. embeddings: ``[B, W, H]``, which the first layer reads, too, if there are any."""
        found, read = [], () if embeddings is None else (embeddings,)
        for layer, before in zip(layers, self.before.split_layers(len(layers)), strict=True):
            x, entries = layer(x, replace(self, before=before), *read)
            found.append(entries)
            read = ()
        return x, KeyValues.join_layers(found)

    @classmethod
    def causal(cls, begin: KeyValues, count: int) -> AttentionContext:
        """Returns the context of ``count`` entries of each text, for texts that are read at once:
        an entry sees the earlier ones and itself. begin: no entries, of as many rows."""
        rows, device = len(begin.keys), begin.keys.device
        at = torch.arange(count, device=device)
        return cls(at.expand(rows, -1), begin, (at <= at[:, None]).expand(rows, -1, -1))


@dataclass(frozen=True, kw_only=True)
class LayerConfig(HeadConfig):
    """Sizes of a head's decoder layers. Those that are 0 follow from the target's width."""

    heads: int = 0
    """Attention heads; 0: one for each 64 of the width."""
    groups: int = 0
    """Heads of keys and values; 0: as many as attention heads."""
    head_dim: int = 0
    """Width of an attention head; 0: all of them together are as wide as the target."""
    inner_size: int = 0
    """Width of the feed-forward part; 0: three times the target's."""
    norm_eps: float = 1e-6
    rope: dict[str, Any] = field(default_factory=lambda: dict(DEFAULT_ROPE))
    """Rotary positions, as in transformers. Those of another kind than "default" come with what
    transformers makes of them: ``inv_freq``, and ``attention_factor`` for queries and keys."""

    def __post_init__(self) -> None:
        super().__post_init__()
        kind, base = self.rope.get("rope_type"), self.rope.get("rope_theta")
        known = kind == "default" or isinstance(self.rope.get("inv_freq"), list)
        if not known or not isinstance(base, (int, float)) or base <= 0:
            raise ValueError(
                f"rope is {self.rope!r}, and only the plain kind with a base, or one with its "
                "frequencies, is known"
            )


class RMSNorm(nn.RMSNorm):
    """Computes in the precision of its weights, also after products that were made in another."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class Attention(nn.Module):
    """Grouped attention with rotary positions."""

    scale: float | None = None
    """What scores are multiplied with; None: as their width says."""

    def __init__(
        self,
        size: int,
        config: LayerConfig,
        *,
        inputs: int | None = None,
        bias: bool = False,
        output_bias: bool = False,
        normed: bool = False,
        window: int = 0,
    ) -> None:
        """inputs: their width, that of the outputs if unset. bias: whether queries, keys and values
        have one. output_bias: whether what the heads say together has one. normed: whether queries
        and keys are normalised, as in Qwen3. window: how many entries each attends to at most, the
        last that it sees, itself among them; 0: all."""
        super().__init__()
        self.heads = config.heads or default_num_heads(size, halved=True)
        self.groups = config.groups or self.heads
        self.head_dim = config.head_dim or size // self.heads
        if self.heads % self.groups or self.head_dim % 2 or not self.head_dim:
            raise ValueError(
                f"{self.heads} heads of width {self.head_dim} in {self.groups} groups do not fit"
            )
        self.window = window
        self.layer_idx = 0
        """The number of its layer among those of a head that our own code computes together."""
        self.rotary = Rotary(config.rope, self.head_dim)
        wide = inputs or size
        self.q_proj = nn.Linear(wide, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(wide, self.groups * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(wide, self.groups * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, size, bias=output_bias)
        # Of the dtype and on the device of the weights, also where these are rounded to integers.
        self.register_buffer("like", torch.empty(0), persistent=False)
        self.q_norm = RMSNorm(self.head_dim, eps=config.norm_eps) if normed else None
        self.k_norm = RMSNorm(self.head_dim, eps=config.norm_eps) if normed else None

    like: Tensor

    def begin(self, rows: int) -> KeyValues:
        """Returns no entries of ``rows`` rows."""
        none = self.like.new_empty(rows, self.groups, 0, self.head_dim)
        return KeyValues(none, none)

    def entries(self, x: Tensor, positions: Tensor) -> KeyValues:
        """Returns the keys and values of inputs ``[B, W, inputs]`` at positions ``[B, W]``."""
        return self._entries(x, self._position_embeddings(positions, x.dtype))

    def forward(self, x: Tensor, attn_context: AttentionContext) -> tuple[Tensor, KeyValues]:
        """x: ``[B, W, inputs]`` -> ``[B, W, H]``, and the keys and values of these."""
        position_embeddings = self._position_embeddings(attn_context.positions, x.dtype)
        own = self._entries(x, position_embeddings)
        together = attn_context.before.then(own)
        found = nn.functional.scaled_dot_product_attention(
            _apply_rotary(
                normalised(self._split(self.q_proj(x)), self.q_norm), position_embeddings
            ),
            together.keys,
            together.values,
            attn_mask=apply_window(attn_context.visible, self.window)[:, None],
            scale=self.scale,
            enable_gqa=self.groups != self.heads,
        )  # [B, heads, W, D]
        return self.o_proj(found.transpose(1, 2).flatten(2)), own

    def _entries(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> KeyValues:
        keys = _apply_rotary(
            normalised(self._split(self.k_proj(x)), self.k_norm), position_embeddings
        )
        return KeyValues(keys, self._split(self._values(x)))

    def _values(self, x: Tensor) -> Tensor:
        found: Tensor = self.v_proj(x)
        return found

    def _split(self, x: Tensor) -> Tensor:
        """``[B, W, heads D]`` -> ``[B, heads, W, D]``."""
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)

    def _position_embeddings(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The cosines and sines ``[B, 1, W, D']`` by which positions turn the first D' elements of
        queries and keys."""
        cos, sin = self.rotary(positions, dtype)
        return cos[:, None], sin[:, None]


class Rotary:
    """By how much positions turn queries and keys. It is no module: its frequencies would be
    rounded with the weights."""

    def __init__(self, rope: Mapping[str, Any], head_dim: int) -> None:
        self._inv_freq = _frequencies(rope, head_dim)
        self._factor = float(rope.get("attention_factor") or 1.0)
        self._table: tuple[Tensor, Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns what copies and pickles hold: the table is worked out anew."""
        return {**self.__dict__, "_table": None}

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns the cosines and sines ``[B, W, D']`` by which positions ``[B, W]`` turn the first
        D' elements of queries and keys."""
        if self._inv_freq.device != positions.device:
            self._inv_freq = self._inv_freq.to(positions.device)
        angle = positions[..., None].float() * self._inv_freq
        angle = torch.cat([angle, angle], -1)
        return (angle.cos() * self._factor).to(dtype), (angle.sin() * self._factor).to(dtype)

    def table(self, positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns the same for the first positions, maybe with others after them, ``[P, D']``. It
        is kept."""
        found = self._table
        if found is None or len(found[0]) < positions or found[0].dtype != dtype:
            count = power_of_two(max(256, positions))
            cos, sin = self(torch.arange(count, device="cpu")[None], dtype)
            found = self._table = cos[0], sin[0]
        return found


def normalised(x: Tensor, norm: nn.Module | None) -> Tensor:
    """Returns x through a norm, or as it is where there is none."""
    found: Tensor = x if norm is None else norm(x)
    return found


def _frequencies(rope: Mapping[str, Any], head_dim: int) -> Tensor:
    """By how much a position turns each pair of elements, ``[D' / 2]``, in float32 as in
    transformers."""
    given = rope.get("inv_freq")
    if given is not None:
        found = torch.tensor(given, dtype=torch.float32)
        if found.dim() != 1 or not 0 < len(found) <= head_dim // 2 or not found.isfinite().all():
            raise ValueError(f"inv_freq has no frequencies for heads of width {head_dim}")
        return found
    turned = int(head_dim * float(rope.get("partial_rotary_factor") or 1.0))
    if turned % 2 or not 0 < turned <= head_dim:
        raise ValueError(f"rope turns {turned} of {head_dim} elements of a head")
    steps = torch.arange(0, turned, 2).float() / turned
    return 1.0 / float(rope["rope_theta"]) ** steps


def _apply_rotary(x: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = position_embeddings
    if cos.shape[-1] < x.shape[-1]:
        turned = cos.shape[-1]
        return torch.cat([_apply_rotary(x[..., :turned], position_embeddings), x[..., turned:]], -1)
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def default_num_heads(size: int, halved: bool = False) -> int:
    """Returns the most attention heads that share a width evenly and are 64 wide or wider, at least
    1. halved: each head also has two halves, as rotary positions need them.

    >>> default_num_heads(192), default_num_heads(193), default_num_heads(65 * 3, halved=True)
    (3, 1, 1)
    """
    multiple = 2 if halved else 1
    counts = range(max(1, size // 64), 0, -1)
    return next((count for count in counts if size % (multiple * count) == 0), 1)
