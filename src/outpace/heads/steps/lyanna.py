"""States that go on by themselves, and tokens that are put into them afterwards.

Chen et al. 2026, "Lyanna", arXiv 2602.21224: a draft's states that do not depend on its tokens
outlive a mismatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from outpace.heads.base import HeadConfig, Shared, TargetShape
from outpace.heads.layers import Norm
from outpace.heads.steps.base import StepHead


@dataclass(frozen=True, kw_only=True)
class LyannaConfig(HeadConfig):
    """What such a head is built from."""

    depths: int = 6
    """Tokens behind the root that it guesses."""
    blocks: int = 2
    """Residual blocks from a state to the next one."""
    inner_size: int = 0
    """Width of their feed-forward parts; 0: twice the target's."""


class Lyanna(StepHead):
    """``s_d = f(s_(d-1))``, whatever the tokens are; the guess at depth d is made of s_d and of
    what is remembered of the tokens, ``u_d = a u_(d-1) + W E[token]``.

    f is the same at all depths. So a state that was made for one place serves there whichever
    tokens come before it: with the right ones, once they are known.
    """

    kind: ClassVar[str] = "lyanna"
    Config: ClassVar[type[HeadConfig]] = LyannaConfig

    def __init__(self, target: TargetShape, config: LyannaConfig) -> None:
        super().__init__(target, config)
        size = target.hidden_size
        inner = config.inner_size or 2 * size
        self.blocks = nn.Sequential(*(StateBlock(size, inner) for _ in range(config.blocks)))
        self.token_norm = Norm(size, eps=1e-6)
        self.token = nn.Linear(size, size, bias=False)
        self.kept = nn.Parameter(torch.zeros(size))  # a is its sigmoid
        self.state_norm = Norm(size, eps=1e-6)
        self.joined = nn.Linear(2 * size, size)
        self.result = nn.Linear(size, size, bias=False)
        self.output = nn.Linear(size, self.vocabulary, bias=False)

    def step(
        self, memory: Tensor, tokens: Tensor, depth: int, shared: Shared
    ) -> tuple[Tensor, Tensor]:
        size = self.target.hidden_size
        state = self.advance(memory[..., :size])
        remembered = memory[..., size:] if depth > 1 else torch.zeros_like(state)
        remembered = self.remember(remembered, tokens, shared)
        return self.say(state, remembered), torch.cat([state, remembered], -1)

    def advance(self, states: Tensor) -> Tensor:
        """Returns the next states ``[..., H]``."""
        found: Tensor = self.blocks(states)
        return found

    def remember(self, remembered: Tensor, tokens: Tensor, shared: Shared) -> Tensor:
        """Returns what is remembered of tokens ``[...]``, and of those before, ``[..., H]``."""
        embedded = self.token_norm(shared.embed(tokens).to(remembered.dtype))
        found: Tensor = self.kept.sigmoid() * remembered + self.token(embedded)
        return found

    def say(self, states: Tensor, remembered: Tensor) -> Tensor:
        """Returns the logits ``[..., V']`` of the tokens behind these, all ``[..., H]``."""
        both = self.joined(torch.cat([self.state_norm(states), remembered], -1))
        found: Tensor = self.output(states + self.result(nn.functional.silu(both)))
        return found

    @torch.no_grad()
    def begin_from(self, shared_head: Tensor | None) -> None:
        """Each depth begins as the target's own head on the unchanged state."""
        nn.init.zeros_(self.result.weight)
        for name, weight in self.blocks.named_parameters():
            if name.endswith("down.weight"):
                nn.init.zeros_(weight)
        if shared_head is not None:
            self.output.weight.copy_(shared_head)


class StateBlock(nn.Module):
    """A residual feed-forward part."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.norm = Norm(size, eps=1e-6)
        self.up = nn.Linear(size, inner, bias=False)
        self.down = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: ``[..., H]`` -> the same shape."""
        found: Tensor = x + self.down(nn.functional.silu(self.up(self.norm(x))))
        return found
