"""EAGLE-3: one decoder layer over the text, which reads three layers of the target.

Li et al. 2025, arXiv 2503.01840. The parts are named as in the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outpace.heads.attending import AttendingHead, Entries
from outpace.heads.base import HeadConfig, Shared, TargetShape

DEEP = 8
"""Layers from which on a target's three states are taken where the paper takes them."""

PLAIN_ROTARY: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(HeadConfig):
    """What an EAGLE-3 head is built from. Sizes that are 0 follow from the target's width."""

    depths: int = 5
    """Tokens behind the root that it is trained for; it drafts as far as it is asked to."""
    heads: int = 0
    """Attention heads; 0: one for each 64 of the width."""
    groups: int = 0
    """Heads of keys and values; 0: as many as attention heads."""
    head_dim: int = 0
    """Width of an attention head; 0: all of them together are as wide as the target."""
    inner_size: int = 0
    """Width of the feed-forward part; 0: three times the target's."""
    norm_eps: float = 1e-6
    rope: dict[str, Any] = field(default_factory=lambda: dict(PLAIN_ROTARY))
    """Rotary positions, as in transformers."""
    reads: list[int] = field(default_factory=list)
    """The target's three layers that it reads; none: as `Eagle3.layers` says."""
    own_embedding: bool = False
    """Whether it has embeddings of its own instead of the target's."""

    def __post_init__(self) -> None:
        kind, base = self.rope.get("rope_type"), self.rope.get("rope_theta")
        if kind != "default" or not isinstance(base, (int, float)) or base <= 0:
            raise ValueError(f"rope is {self.rope!r}, and only the plain kind with a base is known")
        if self.reads and (len(self.reads) != 3 or any(type(at) is not int for at in self.reads)):
            raise ValueError(f"reads is {self.reads!r}, and not three layers")


class Eagle3(AttendingHead):
    """One decoder layer on the target's embedding of a token and a guide, side by side."""

    kind: ClassVar[str] = "eagle3"
    Config: ClassVar[type[HeadConfig]] = Eagle3Config

    def __init__(self, target: TargetShape, config: Eagle3Config) -> None:
        super().__init__(target, config)
        size = target.hidden_size
        self._reads = tuple(config.reads)
        self.fc = nn.Linear(3 * size, size, bias=False)
        self.midlayer = DecoderLayer(size, config)
        self.norm = nn.RMSNorm(size, eps=config.norm_eps)
        self.lm_head = nn.Linear(size, self.vocabulary, bias=False)
        self.embed_tokens = nn.Embedding(target.vocab_size, size) if config.own_embedding else None

    @property
    def layers(self) -> tuple[int, ...]:
        """Behind two layers, in the middle, and three before the end. Where that does not make
        three places, a third and two thirds of the way up, and what the target's head reads."""
        count = self.target.layers
        if self._reads:
            return self._reads
        if count >= DEEP:
            return (2, count // 2, count - 3)
        return (count // 3, 2 * count // 3, -1)

    def guide(self, states: Tensor) -> Tensor:
        found: Tensor = self.fc(states.to(self.dtype))
        return found

    def begin(self, rows: int) -> Entries:
        return self.midlayer.self_attn.begin(rows)

    def step(
        self,
        guides: Tensor,
        tokens: Tensor,
        positions: Tensor,
        before: Entries,
        visible: Tensor,
        shared: Shared,
    ) -> tuple[Tensor, Entries]:
        embed = shared.embed if self.embed_tokens is None else self.embed_tokens
        embedded = embed(tokens).to(guides.dtype)
        found: tuple[Tensor, Entries] = self.midlayer(embedded, guides, positions, before, visible)
        return found

    def logits(self, outputs: Tensor, shared: Shared) -> Tensor:
        found: Tensor = self.lm_head(self.norm(outputs))
        return found

    @torch.no_grad()
    def begin_from(self, shared_head: Tensor | None) -> None:
        """The guide begins as the highest of the three states, the head as the target's."""
        size = self.target.hidden_size
        self.fc.weight.zero_()
        self.fc.weight[:, 2 * size :].copy_(torch.eye(size))
        if shared_head is not None:
            self.lm_head.weight.copy_(shared_head)


class DecoderLayer(nn.Module):
    """A Llama layer whose attention reads embedding and guide, each normalised, side by side."""

    def __init__(self, size: int, config: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(size, eps=config.norm_eps)
        self.hidden_norm = nn.RMSNorm(size, eps=config.norm_eps)
        self.self_attn = Attention(size, config)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=config.norm_eps)
        self.mlp = FeedForward(size, config.inner_size or 3 * size)

    def forward(
        self, embedded: Tensor, guides: Tensor, positions: Tensor, before: Entries, visible: Tensor
    ) -> tuple[Tensor, Entries]:
        """As `AttendingHead.step`."""
        seen = torch.cat([self.input_layernorm(embedded), self.hidden_norm(guides)], -1)
        attended, entries = self.self_attn(seen, positions, before, visible)
        state = guides + attended
        return state + self.mlp(self.post_attention_layernorm(state)), entries


class Attention(nn.Module):
    """Grouped attention with rotary positions, from inputs twice as wide as its outputs."""

    def __init__(self, size: int, config: Eagle3Config) -> None:
        super().__init__()
        self.heads = config.heads or _heads(size)
        self.groups = config.groups or self.heads
        self.head_dim = config.head_dim or size // self.heads
        if self.heads % self.groups or self.head_dim % 2 or not self.head_dim:
            raise ValueError(
                f"{self.heads} heads of width {self.head_dim} in {self.groups} groups do not fit"
            )
        self.base = float(config.rope["rope_theta"])
        self.q_proj = nn.Linear(2 * size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * size, self.groups * self.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * size, self.groups * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, size, bias=False)

    def begin(self, rows: int) -> Entries:
        """Returns no entries of so many rows."""
        none = self.k_proj.weight.new_empty(rows, self.groups, 0, self.head_dim)
        return Entries(none, none)

    def forward(
        self, x: Tensor, positions: Tensor, before: Entries, visible: Tensor
    ) -> tuple[Tensor, Entries]:
        """x: ``[B, W, 2 H]`` -> ``[B, W, H]``, and the keys and values of these."""
        turn = self._turn(positions, x.dtype)
        own = Entries(_turned(self._split(self.k_proj(x)), turn), self._split(self.v_proj(x)))
        together = before.then(own)
        found = nn.functional.scaled_dot_product_attention(
            _turned(self._split(self.q_proj(x)), turn),
            together.keys,
            together.values,
            attn_mask=visible[:, None],
            enable_gqa=self.groups != self.heads,
        )  # [B, heads, W, D]
        return self.o_proj(found.transpose(1, 2).flatten(2)), own

    def _split(self, x: Tensor) -> Tensor:
        """``[B, W, heads D]`` -> ``[B, heads, W, D]``."""
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)

    def _turn(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The cosines and sines ``[B, 1, W, D]`` by which positions turn queries and keys."""
        steps = torch.arange(0, self.head_dim, 2, device=positions.device).float() / self.head_dim
        angle = positions[:, None, :, None].float() / self.base**steps
        angle = torch.cat([angle, angle], -1)
        return angle.cos().to(dtype), angle.sin().to(dtype)


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


def _turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = turn
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def _heads(size: int) -> int:
    """The most heads of a width of 64 or more that share a width evenly, and each in halves."""
    counts = range(max(1, size // 64), 0, -1)
    return next((count for count in counts if size % (2 * count) == 0), 1)
