"""Medusa: one small head for each future token, all of them on the same state.

Cai et al. 2024, arXiv 2401.10774.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from outpace.heads.base import HeadConfig, ResidualBlock, Shared, TargetShape
from outpace.heads.steps.base import StepHead


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadConfig):
    """What a Medusa head is built from."""

    blocks: int = 1
    """Residual blocks of each head."""


class Medusa(StepHead):
    """Head k guesses the k-th token behind the root, whatever the tokens in between are."""

    kind: ClassVar[str] = "medusa"
    Config: ClassVar[type[HeadConfig]] = MedusaConfig

    def __init__(self, target: TargetShape, config: MedusaConfig) -> None:
        super().__init__(target, config)
        size = target.hidden_size
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(size) for _ in range(config.blocks)))
            for _ in range(config.depths)
        )
        self.outputs = nn.ModuleList(
            nn.Linear(size, self.vocabulary, bias=False) for _ in range(config.depths)
        )

    @property
    def depths_at_once(self) -> int:
        return self.config.depths

    def step(
        self, memory: Tensor, tokens: Tensor, depth: int, shared: Shared
    ) -> tuple[Tensor, Tensor]:
        return self.outputs[depth - 1](self.blocks[depth - 1](memory)), memory

    @torch.no_grad()
    def begin_from(self, shared_head: Tensor | None) -> None:
        """Each head begins as the target's own."""
        if shared_head is not None:
            for output in self.outputs.parameters():
                output.copy_(shared_head)
