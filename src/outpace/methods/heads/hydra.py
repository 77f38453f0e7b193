"""Hydra: heads that also see the tokens drafted so far.

Ankner et al. 2024, arXiv 2402.05109. With ``prefix`` and four ``blocks`` it is the strongest
variant of that paper, Hydra++.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outpace.heads.base import HeadConfig, ResidualBlock, Shared, TargetShape
from outpace.methods.heads.steps import PrefixConfig, StepHead, StepHeadDrafter

# -- the network -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class HydraConfig(PrefixConfig):
    """What a Hydra head is built from."""

    blocks: int = 1
    """Residual blocks of each head; four in the paper's strongest variant. The first one joins
    state and tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.blocks < 1:
            raise ValueError(f"blocks is {self.blocks}")


class Hydra(StepHead):
    """Head k sees the state, and the embeddings of the root and of the k - 1 tokens after it."""

    kind: ClassVar[str] = "hydra"
    Config: ClassVar[type[HeadConfig]] = HydraConfig

    def __init__(self, target: TargetShape, config: HydraConfig) -> None:
        super().__init__(target, config)
        size = target.hidden_size
        self.blocks = nn.ModuleList(
            nn.Sequential(
                ResidualBlock(size * (depth + 1), size),
                *(ResidualBlock(size) for _ in range(config.blocks - 1)),
            )
            for depth in range(1, config.depths + 1)
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
        seen = torch.cat([memory, shared.embed(tokens).to(memory.dtype)], -1)
        return self.outputs[depth - 1](self.blocks[depth - 1](seen)), seen

    @torch.no_grad()
    def begin_from(self, shared_head: Tensor | None) -> None:
        """Each head begins as the target's own on the unchanged state."""
        super().begin_from(shared_head)
        size = self.target.hidden_size
        for blocks in self.blocks:
            narrow = blocks.get_submodule("0.narrow").get_parameter("weight")  # [H, inputs]
            narrow.zero_()
            narrow[:, :size].copy_(torch.eye(size))
        if shared_head is not None:
            for output in self.outputs.parameters():
                output.copy_(shared_head)


# -- how it drafts ---------------------------------------------------------------------------------


class HydraDrafter(StepHeadDrafter):
    """Drafts with a `Hydra` head."""

    name: ClassVar[str] = "hydra"
    specimen_sizes: ClassVar[Mapping[str, Any]] = {"depths": 3, "prefix": True}
