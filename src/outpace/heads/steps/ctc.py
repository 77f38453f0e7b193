"""A head with a CTC output: frames that are all guessed at once, some of them blank or repeated.

Wen et al. 2024, "Speculative Decoding with CTC-based Draft Model for LLM Inference Acceleration",
arXiv 2412.00061.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from outpace.heads.base import HeadConfig, Shared, TargetShape
from outpace.heads.layers import Norm, most_heads
from outpace.heads.steps.base import PrefixConfig, StateHead


@dataclass(frozen=True, kw_only=True)
class CtcConfig(PrefixConfig):
    """What a CTC head is built from."""

    frames: int = 6
    """Guesses that are made at once; the text that they spell is shorter, or as long."""
    inner_size: int = 0
    """Width of the feed-forward part; 0: the target's."""


class Ctc(StateHead):
    """One transformer layer over the frames, each of which starts from the target's state.

    The frames spell a text: repeated tokens count once, and blank frames not at all (Graves et al.
    2006). So the head need not know at which place a token comes in order to guess that it comes.
    The paper's layer attends over the whole text; this one starts from the state that the target
    drew the root from, which has done that, or with ``prefix`` from what a layer over the text
    makes of it.
    """

    kind: ClassVar[str] = "ctc"
    Config: ClassVar[type[HeadConfig]] = CtcConfig
    learns_online: ClassVar[bool] = False
    recipe: ClassVar[str] = "ctc"

    def __init__(self, target: TargetShape, config: CtcConfig) -> None:
        super().__init__(target, config)
        if config.frames < config.depths:
            raise ValueError(f"{config.frames} frames do not spell {config.depths} tokens")
        size = target.hidden_size
        self.places = nn.Parameter(torch.empty(config.frames, size))
        self.joined = nn.Linear(2 * size, size, bias=False)
        self.layer = FrameLayer(size, config.inner_size or size)
        self.output = nn.Linear(size, self.vocabulary, bias=False)
        self.blank = nn.Linear(size, 1)
        nn.init.normal_(self.places, std=0.02)

    @property
    def depths_at_once(self) -> int:
        return self.config.depths

    @property
    def frames(self) -> int:
        """How many there are, F."""
        return len(self.places)

    def guess(self, states: Tensor, roots: Tensor, shared: Shared) -> Tensor:
        """Returns the logits ``[B, W, F, V' + 1]`` of all frames; the last one is the blank's.

        states: ``[B, W, H]``, what the guesses behind the roots ``[B, W]`` start from.
        """
        seen = torch.cat([states, shared.embed(roots).to(states.dtype)], -1)
        start = states + self.joined(seen)
        found = self.layer(start[:, :, None] + self.places)  # [B, W, F, H]
        return torch.cat([self.output(found), self.blank(found)], -1)

    @torch.no_grad()
    def begin_from(self, shared_head: Tensor | None) -> None:
        """Each frame begins as the target's own head on the unchanged state."""
        super().begin_from(shared_head)
        for weight in (self.joined.weight, self.layer.attention.out_proj.weight):
            nn.init.zeros_(weight)
        nn.init.zeros_(self.layer.down.weight)
        if shared_head is not None:
            self.output.weight.copy_(shared_head)


class FrameLayer(nn.Module):
    """A transformer layer in which the frames of one place see each other."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.attention_norm = Norm(size, eps=1e-6)
        self.attention = nn.MultiheadAttention(size, most_heads(size), bias=False, batch_first=True)
        self.norm = Norm(size, eps=1e-6)
        self.up = nn.Linear(size, inner, bias=False)
        self.down = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: ``[B, W, F, H]`` -> the same shape."""
        flat = x.flatten(0, 1)
        seen = self.attention_norm(flat)
        flat = flat + self.attention(seen, seen, seen, need_weights=False)[0]
        found: Tensor = flat + self.down(nn.functional.silu(self.up(self.norm(flat))))
        return found.view_as(x)
