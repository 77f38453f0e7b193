"""The MLP speculator: a small recurrent network over the target's state and the drafted tokens.

Wertheimer et al. 2024, arXiv 2404.19124.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from outpace.heads.base import HeadConfig, Shared, StepHead, TargetShape


@dataclass(frozen=True, kw_only=True)
class MlpSpeculatorConfig(HeadConfig):
    """What an MLP speculator is built from."""

    inner_size: int = 512
    """Width of its state."""
    tied: bool = True
    """Whether all depths share their weights (the first matrix apart: it reads the target's
    state)."""


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
        self.ln = nn.ModuleList(nn.LayerNorm(inner) for _ in range(own))
        self.head = nn.ModuleList(nn.Linear(inner, self.vocabulary, bias=False) for _ in range(own))
        for table in self.emb:
            nn.init.normal_(table.weight, std=inner**-0.5)  # type: ignore[arg-type]

    def step(
        self, memory: Tensor, tokens: Tensor, depth: int, shared: Shared
    ) -> tuple[Tensor, Tensor]:
        at = min(depth, len(self.emb)) - 1
        state = self.proj[min(depth, len(self.proj)) - 1](memory)
        state = self.ln[at](state + self.token_share * self.emb[at](tokens))
        state = nn.functional.gelu(state)
        return self.head[at](state), state
