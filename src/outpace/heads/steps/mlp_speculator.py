"""The MLP speculator: a small recurrent network over the target's state and the drafted tokens.

Wertheimer et al. 2024, arXiv 2404.19124.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from outpace.heads.base import HeadConfig, Shared, TargetShape
from outpace.heads.steps.base import StepHead

EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class MlpSpeculatorConfig(HeadConfig):
    """What an MLP speculator is built from."""

    inner_size: int = 512
    """Width of its state."""
    tied: bool = True
    """Whether all depths share their weights (the first matrix apart: it reads the target's
    state)."""
    centred: bool = True
    """Whether states are normalised about their mean; in published speculators they are not."""
    scaled: bool = False
    """Whether the target's state is normalised first."""


class MlpSpeculator(StepHead):
    """``s_k = GELU(norm(W s_(k-1) + a E[token]))``; the guesses at depth k are ``H s_k``.

    a keeps the shares of state and token in the sum as they are in the paper, at every depth.
    """

    kind: ClassVar[str] = "mlp_speculator"
    Config: ClassVar[type[HeadConfig]] = MlpSpeculatorConfig

    def __init__(self, target: TargetShape, config: MlpSpeculatorConfig) -> None:
        super().__init__(target, config)
        inner, own = config.inner_size, 1 if config.tied else config.depths
        states = min(own + 1, config.depths)  # the first one is wider than the others
        state_share = 0.5 ** (0.5 / config.depths)
        self.token_share = math.sqrt((1 - state_share**2) * inner / 2) / state_share
        self.emb = nn.ModuleList(nn.Embedding(target.vocab_size, inner) for _ in range(own))
        self.proj = nn.ModuleList(
            nn.Linear(inner if k else target.hidden_size, inner, bias=False) for k in range(states)
        )
        norm = nn.LayerNorm if config.centred else ShiftedNorm
        self.ln = nn.ModuleList(norm(inner) for _ in range(own))
        self.scaled = config.scaled
        self.head = nn.ModuleList(nn.Linear(inner, self.vocabulary, bias=False) for _ in range(own))
        for table in self.emb:
            nn.init.normal_(table.weight, std=inner**-0.5)  # type: ignore[arg-type]

    @property
    def depths_at_once(self) -> int:
        return len(self.emb)

    def step(
        self, memory: Tensor, tokens: Tensor, depth: int, shared: Shared
    ) -> tuple[Tensor, Tensor]:
        at = min(depth, len(self.emb)) - 1
        if depth == 1 and self.scaled:
            memory = nn.functional.rms_norm(memory, memory.shape[-1:], eps=EPS) / math.sqrt(2)
        state = self.proj[min(depth, len(self.proj)) - 1](memory)
        state = self.ln[at](state + self.token_share * self.emb[at](tokens))
        state = nn.functional.gelu(state)
        return self.head[at](state), state


class ShiftedNorm(nn.Module):
    """Normalises by the mean square, and then scales and shifts."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """x: ``[..., size]`` -> the same shape."""
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight, EPS) + self.bias
