"""Hidden transfer: pseudo hidden states of the tokens to come, which the target refines.

Wu et al. 2024, "Parallel Decoding via Hidden Transfer for Lossless Large Language Model
Acceleration", arXiv 2404.12022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from outpace.heads.base import HeadConfig, TargetShape
from outpace.methods.heads.aux_tokens import AuxHead, AuxHeadDrafter

# -- the network -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class HiddenTransferConfig(HeadConfig):
    """What a hidden-transfer head is built from."""

    depths: int = 3
    """Pseudo states. Each node that is scored brings as many columns along."""
    layer: int = 0
    """The target's layer, from 1 on, at which they join; 0: half-way up."""


class HiddenTransfer(AuxHead):
    """One linear map for each depth, from a token's state at a layer to that of a token to come.

    The pseudo states go through the remaining layers like any others and see the text there.
    """

    kind: ClassVar[str] = "hidden_transfer"
    Config: ClassVar[type[HeadConfig]] = HiddenTransferConfig

    def __init__(self, target: TargetShape, config: HiddenTransferConfig) -> None:
        super().__init__(target, config)
        if target.layers < 2 or config.layer >= target.layers:
            raise ValueError(
                f"layer is {config.layer}, and columns join after the first of {target.layers} "
                "layers at the earliest, before the last one at the latest"
            )
        self._layer = config.layer or target.layers // 2
        size = target.hidden_size
        self.maps = nn.ModuleList(nn.Linear(size, size) for _ in range(config.depths))
        self.init_from_lm_head(None)

    @property
    def entry_layer(self) -> int:
        return self._layer

    def columns(self, states: Tensor) -> Tensor:
        states = states.to(self.dtype)
        return torch.stack([each(states) for each in self.maps], 2)

    @torch.no_grad()
    def init_from_lm_head(self, shared_head: Tensor | None) -> None:
        """Each map begins as the identity."""
        for each in self.maps:
            nn.init.eye_(each.get_parameter("weight"))
            nn.init.zeros_(each.get_parameter("bias"))


# -- how it drafts ---------------------------------------------------------------------------------


class HiddenTransferDrafter(AuxHeadDrafter):
    """Drafts with a `HiddenTransfer` head."""

    name: ClassVar[str] = "hidden_transfer"
