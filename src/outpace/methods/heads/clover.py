"""Clover: heads that attend to the tokens drafted so far and pass their state on.

Xiao et al. 2024, arXiv 2405.00263.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outpace.heads.base import HeadConfig, ResidualBlock, SharedModules, TargetShape
from outpace.heads.layers import RMSNorm, default_num_heads
from outpace.methods.heads.steps import PrefixConfig, StepHead, StepHeadDrafter

# -- the network -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CloverConfig(PrefixConfig):
    """What a Clover head is built from."""

    depths: int = 3
    """Tokens after the root that it guesses; the paper's number."""
    heads: int = 0
    """Attention heads; 0: one for each 64 of the width."""


class Clover(StepHead):
    """A state that starts as the target's. At each depth it attends to the tokens after it.

        s_d = block_d(s_(d-1) + attention of (s_(d-1), newest token) over the root and the tokens)

    All depths share the attention and the output matrix; each has a block of its own. The paper's
    augmenting block, one more layer over the whole text, is there with ``prefix``.
    """

    kind: ClassVar[str] = "clover"
    Config: ClassVar[type[HeadConfig]] = CloverConfig

    def __init__(self, target: TargetShape, config: CloverConfig) -> None:
        super().__init__(target, config)
        size = target.hidden_size
        self.attention = PathAttention(size, config.depths, config.heads or default_num_heads(size))
        self.blocks = nn.ModuleList(ResidualBlock(size) for _ in range(config.depths))
        self.output = nn.Linear(size, self.vocabulary, bias=False)

    def step(
        self, memory: Tensor, tokens: Tensor, depth: int, shared: SharedModules
    ) -> tuple[Tensor, Tensor]:
        size = self.target.hidden_size
        embedded = shared.embed(tokens).to(memory.dtype)
        path = torch.cat([memory[..., size:], embedded], -1)  # [B, W, depth H]
        before = memory[..., :size]
        state = before + self.attention(before, path.view(*path.shape[:2], depth, size))
        state = self.blocks[depth - 1](state)
        return self.output(state), torch.cat([state, path], -1)

    @torch.no_grad()
    def init_from_lm_head(self, shared_head: Tensor | None) -> None:
        """Each depth begins as the target's own head on the unchanged state."""
        super().init_from_lm_head(shared_head)
        nn.init.zeros_(self.attention.result.weight)
        if shared_head is not None:
            self.output.weight.copy_(shared_head)


class PathAttention(nn.Module):
    """Attention of a state to the tokens after it. Its query is made of the state and the newest
    of these tokens."""

    def __init__(self, size: int, depths: int, heads: int) -> None:
        super().__init__()
        if size % heads:
            raise ValueError(f"{heads} attention heads do not share a width of {size}")
        self.heads = heads
        self.state_norm = RMSNorm(size, eps=1e-6)
        self.token_norm = RMSNorm(size, eps=1e-6)
        self.places = nn.Parameter(torch.zeros(depths, size))
        self.query = nn.Linear(2 * size, size, bias=False)
        self.keys = nn.Linear(size, 2 * size, bias=False)
        self.result = nn.Linear(size, size, bias=False)

    def forward(self, state: Tensor, path: Tensor) -> Tensor:
        """state: ``[B, W, H]``; path: ``[B, W, D, H]``, embeddings, the newest last ->
        ``[B, W, H]``."""
        seen = self.token_norm(path) + self.places[: path.shape[2]]
        query = self.query(torch.cat([self.state_norm(state), seen[:, :, -1]], -1))
        keys, values = self.keys(seen).chunk(2, -1)
        found = nn.functional.scaled_dot_product_attention(
            self._split(query[:, :, None]), self._split(keys), self._split(values)
        )  # [B, W, heads, 1, H / heads]
        result: Tensor = self.result(found.flatten(2))
        return result

    def _split(self, x: Tensor) -> Tensor:
        """``[B, W, D, H]`` -> ``[B, W, heads, D, H / heads]``."""
        return x.view(*x.shape[:-1], self.heads, -1).transpose(2, 3)


# -- how it drafts ---------------------------------------------------------------------------------


class CloverDrafter(StepHeadDrafter):
    """Drafts with a `Clover` head."""

    name: ClassVar[str] = "clover"
    dummy_sizes: ClassVar[Mapping[str, Any]] = {"depths": 3, "prefix": True}
