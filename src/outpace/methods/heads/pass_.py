"""PaSS: look-ahead embeddings, the only weights of a head.

Monea, Joulin and Grave 2023, "PaSS: Parallel Speculative Sampling", arXiv 2311.13581.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from outpace.heads.base import HeadConfig, SharedModules, TargetShape
from outpace.methods.heads.aux_tokens import AuxHead, AuxHeadDrafter

# -- the network -----------------------------------------------------------------------------------


SAMPLE = 4096
"""Tokens whose embeddings say where look-ahead embeddings begin."""


@dataclass(frozen=True, kw_only=True)
class PassConfig(HeadConfig):
    """What a PaSS head is built from."""

    depths: int = 3
    """Look-ahead embeddings. Each node that is scored brings as many columns along."""


class Pass(AuxHead):
    """One embedding for each depth, which is read where the text will go on."""

    kind: ClassVar[str] = "pass"
    Config: ClassVar[type[HeadConfig]] = PassConfig

    def __init__(self, target: TargetShape, config: PassConfig) -> None:
        super().__init__(target, config)
        self.embeddings = nn.Parameter(torch.empty(config.depths, target.hidden_size))
        nn.init.normal_(self.embeddings, std=0.02)

    def columns(self, states: Tensor) -> Tensor:
        return self.embeddings.expand(*states.shape[:-1], -1, -1)

    @torch.no_grad()
    def init_from_embeddings(self, shared: SharedModules) -> None:
        """They begin as a mean token, each with a little of its own."""
        count = min(SAMPLE, self.target.vocab_size)
        known = shared.embed(torch.arange(count, device=self.embeddings.device)).float()
        own = torch.randn_like(self.embeddings) * known.std()
        self.embeddings.copy_(known.mean(0) + 0.5 * own)


# -- how it drafts ---------------------------------------------------------------------------------


class PassDrafter(AuxHeadDrafter):
    """Drafts with a `Pass` head."""

    name: ClassVar[str] = "pass"
