"""Multi-token prediction: one decoder layer that goes on where the target's last one ends.

DeepSeek-AI 2024, "DeepSeek-V3", arXiv 2412.19437, section 2.2. A module that is used again and
again, on its own outputs, is FastMTP (Cai et al. 2025, arXiv 2509.18362).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from outpace.heads.attending.base import AttendingHead, Entries, Sight
from outpace.heads.base import HeadConfig, Shared, TargetShape
from outpace.heads.layers import DecoderLayer, LayerConfig, Norm
from outpace.heads.output import TargetOutput


@dataclass(frozen=True, kw_only=True)
class MtpConfig(LayerConfig):
    """What a module is built from. Sizes that are 0 follow from the target's width."""

    depths: int = 3
    """Tokens behind the root that it is trained for; it drafts as far as it is asked to."""


class Block(Protocol):
    """A decoder layer."""

    def begin(self, rows: int) -> Entries:
        """Returns no entries of n rows."""

    def __call__(self, x: Tensor, sight: Sight) -> tuple[Tensor, Entries]:
        """As `heads.layers.DecoderLayer`."""


@dataclass(frozen=True, eq=False)
class Parts:
    """What a module is made of; `nn.Module`, all of them."""

    enorm: nn.Module
    """Normalises the embedding of a token."""
    hnorm: nn.Module
    """Normalises the state before it."""
    eh_proj: nn.Module
    """Joins the two, ``[..., 2 H]`` to ``[..., H]``."""
    block: Block
    post_norm: nn.Module
    """Makes of the layer's output what the target's head reads."""

    @classmethod
    def new(cls, size: int, config: LayerConfig) -> Parts:
        """Returns those of a module with a layer of Qwen3's kind."""
        enorm, hnorm, post_norm = (Norm(size, eps=config.norm_eps) for _ in range(3))
        joined = nn.Linear(2 * size, size, bias=False)
        return cls(enorm, hnorm, joined, DecoderLayer(size, config, normed=True), post_norm)


class Mtp(TargetOutput, AttendingHead):
    """The target's embedding of a token and the state before it, each normalised, joined, through
    one layer; the target's own output matrix makes the logits.

    A head that knows few tokens only has a copy of their rows.
    """

    kind: ClassVar[str] = "mtp"
    Config: ClassVar[type[HeadConfig]] = MtpConfig

    def __init__(
        self,
        target: TargetShape,
        config: MtpConfig,
        parts: Parts | None = None,
        states_first: bool = False,
    ) -> None:
        """parts: of a module that there is already. states_first: whether its ``eh_proj`` reads the
        state before the embedding."""
        super().__init__(target, config)
        size = target.hidden_size
        parts = parts or Parts.new(size, config)
        self.enorm, self.hnorm, self.eh_proj = parts.enorm, parts.hnorm, parts.eh_proj
        self.block, self.post_norm = parts.block, parts.post_norm
        self._states_first = states_first
        self.lm_head = self.copy_of_rows()

    def guide(self, states: Tensor) -> Tensor:
        return states.to(self.dtype)

    def begin(self, rows: int) -> Entries:
        return self.block.begin(rows)

    def step(
        self, guides: Tensor, tokens: Tensor, sight: Sight, shared: Shared
    ) -> tuple[Tensor, Entries]:
        pair = [self.enorm(shared.embed(tokens).to(guides.dtype)), self.hnorm(guides)]
        joined = self.eh_proj(torch.cat(pair[::-1] if self._states_first else pair, -1))
        x, entries = self.block(joined, sight)
        return self.post_norm(x), entries

    def logits(self, outputs: Tensor, shared: Shared) -> Tensor:
        return self.read_out(outputs, shared)

    @torch.no_grad()
    def begin_from(self, shared_head: Tensor | None) -> None:
        """The layer begins on the state as it is; a copy of the target's rows stays as it is."""
        super().begin_from(shared_head)
        size = self.target.hidden_size
        weight = self.eh_proj.get_parameter("weight")
        weight.zero_()
        weight[:, size:].copy_(torch.eye(size))
