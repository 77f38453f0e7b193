"""EAGLE-3: one decoder layer over the text, which reads three layers of the target.

Li et al. 2025, arXiv 2503.01840. The parts are named as in the published checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from outpace.heads.attending.base import AttendingHead, Entries, Sight
from outpace.heads.base import HeadConfig, Shared, TargetShape
from outpace.heads.layers import Attention, FeedForward, LayerConfig, Norm

DEEP = 8
"""Layers from which on a target's three states are taken where the paper takes them."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(LayerConfig):
    """What an EAGLE-3 head is built from. Sizes that are 0 follow from the target's width."""

    depths: int = 5
    """Tokens behind the root that it is trained for; it drafts as far as it is asked to."""
    reads: list[int] = field(default_factory=list)
    """The target's three layers that it reads; none: as `Eagle3.layers` says."""
    own_embedding: bool = False
    """Whether it has embeddings of its own instead of the target's."""
    normed: bool = False
    """Whether queries and keys are normalised, as in Qwen3."""
    norm_before_residual: bool = False
    """Whether what the layer does is added to the normalised guide, and not to the guide."""

    def __post_init__(self) -> None:
        super().__post_init__()
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
        self.midlayer = MidLayer(size, config)
        self.norm = Norm(size, eps=config.norm_eps)
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
        self, guides: Tensor, tokens: Tensor, sight: Sight, shared: Shared
    ) -> tuple[Tensor, Entries]:
        embed = shared.embed if self.embed_tokens is None else self.embed_tokens
        embedded = embed(tokens).to(guides.dtype)
        found: tuple[Tensor, Entries] = self.midlayer(embedded, guides, sight)
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


class MidLayer(nn.Module):
    """A Llama layer whose attention reads embedding and guide, each normalised, side by side."""

    def __init__(self, size: int, config: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = Norm(size, eps=config.norm_eps)
        self.hidden_norm = Norm(size, eps=config.norm_eps)
        self.self_attn = Attention(size, config, inputs=2 * size, normed=config.normed)
        self._norm_first = config.norm_before_residual
        self.post_attention_layernorm = Norm(size, eps=config.norm_eps)
        self.mlp = FeedForward(size, config.inner_size or 3 * size)

    def forward(self, embedded: Tensor, guides: Tensor, sight: Sight) -> tuple[Tensor, Entries]:
        """As `AttendingHead.step`."""
        normed = self.hidden_norm(guides)
        seen = torch.cat([self.input_layernorm(embedded), normed], -1)
        attended, entries = self.self_attn(seen, sight)
        state = (normed if self._norm_first else guides) + attended
        return state + self.mlp(self.post_attention_layernorm(state)), entries
