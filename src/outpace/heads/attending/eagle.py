"""EAGLE: one decoder layer that foresees the target's last hidden states.

EAGLE-1 (Li et al. 2024, arXiv 2401.15077); EAGLE-2 (Li et al. 2024, arXiv 2406.16858) drafts other
trees with the same heads. The parts are named as in the published checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from outpace.heads.attending.base import AttendingHead, Entries, Sight
from outpace.heads.base import HeadConfig, Shared, TargetShape
from outpace.heads.layers import DecoderLayer, LayerConfig
from outpace.heads.output import TargetOutput


@dataclass(frozen=True, kw_only=True)
class EagleConfig(LayerConfig):
    """What an EAGLE head is built from. Sizes that are 0 follow from the target's width."""

    depths: int = 5
    """Tokens behind the root for which its guesses are counted in training; it drafts as far as it
    is asked to."""
    unrolled: int = 1
    """Steps over its own outputs that it learns from. EAGLE has one; with several it is trained as
    in HASS (Zhang et al. 2024, arXiv 2408.15766)."""
    fusion_bias: bool = True
    """Whether the layer that joins token and state has a bias."""
    bias: bool = False
    """Whether queries, keys and values have one, as in heads for Qwen2."""
    input_norm: bool = False
    """Whether attention reads its input normalised."""
    own_embedding: bool = False
    """Whether it has embeddings of its own instead of the target's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.unrolled <= self.depths:
            raise ValueError(f"unrolled is {self.unrolled}, and not from 1 to depths")


class Eagle(TargetOutput, AttendingHead):
    """The target's embedding of a token and the state before it, joined, go through one layer.

    What comes out is the head's guess of the target's state at that token, and the target's own
    output matrix makes logits of it. A head that knows few tokens only has a copy of their rows.
    """

    kind: ClassVar[str] = "eagle"
    Config: ClassVar[type[HeadConfig]] = EagleConfig
    recipe: ClassVar[str] = "eagle"

    def __init__(self, target: TargetShape, config: EagleConfig) -> None:
        super().__init__(target, config)
        self.unrolled = config.unrolled
        size = target.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=config.fusion_bias)
        self.layer = DecoderLayer(size, config, input_norm=config.input_norm, bias=config.bias)
        self.lm_head = self.copy_of_rows()
        self.embed_tokens = nn.Embedding(target.vocab_size, size) if config.own_embedding else None

    def guide(self, states: Tensor) -> Tensor:
        return states.to(self.dtype)

    def begin(self, rows: int) -> Entries:
        return self.layer.begin(rows)

    def step(
        self, guides: Tensor, tokens: Tensor, sight: Sight, shared: Shared
    ) -> tuple[Tensor, Entries]:
        embed = shared.embed if self.embed_tokens is None else self.embed_tokens
        joined = self.fc(torch.cat([embed(tokens).to(guides.dtype), guides], -1))
        found: tuple[Tensor, Entries] = self.layer(joined, sight)
        return found

    def logits(self, outputs: Tensor, shared: Shared) -> Tensor:
        return self.read_out(outputs, shared)

    @torch.no_grad()
    def begin_from(self, shared_head: Tensor | None) -> None:
        """The guess begins as the state before it; a copy of the target's rows stays as it is."""
        super().begin_from(shared_head)
        size = self.target.hidden_size
        self.fc.weight.zero_()
        self.fc.weight[:, size:].copy_(torch.eye(size))
