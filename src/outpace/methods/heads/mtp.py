"""The method "mtp": a multi-token-prediction module drafts (`heads.attending.mtp`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outpace.core.options import option
from outpace.core.values import flag
from outpace.draft.base import Setup
from outpace.draft.branching import growth_of
from outpace.errors import ConfigError
from outpace.heads.attending.base import Entries, Sight
from outpace.heads.attending.mtp import Mtp, MtpConfig, Parts
from outpace.heads.base import Head, TargetShape
from outpace.methods.heads.attending import AttendingHeadDrafter
from outpace.methods.heads.base import TreeHeadOptions
from outpace.targets.hf.loading.loaded import Loaded
from outpace.targets.hf.loading.nextn import NextNBlock, read_nextn


@dataclass(frozen=True, kw_only=True)
class MtpOptions(TreeHeadOptions):
    """What a user may set."""

    model: Any = option(
        None, "A module of 'outpace train mtp'; unset: the one that the target's folder brings."
    )

    def __post_init__(self) -> None:
        if self.model is not None:
            super().__post_init__()
            return
        flag("check", self.check, error=ConfigError)
        growth_of(self.branching, self.top_k, self.depth)
        if self.online is not None:
            raise ConfigError(
                "the module that a checkpoint brings does not learn online: name one of 'outpace "
                "train mtp' as 'model', or leave 'online' out."
            )


class MtpDrafter(AttendingHeadDrafter):
    """Drafts with an `Mtp` module, over and over on its own outputs.

    Of a checkpoint with several modules the first one is used, which is what all of them are in
    most checkpoints; the others foresee tokens that are further away only.
    """

    name: ClassVar[str] = "mtp"
    Options: ClassVar[type[Any]] = MtpOptions

    @classmethod
    def head_for(cls, setup: Setup) -> Head:
        if setup.options.model is not None:
            return super().head_for(setup)
        return brought_module(setup.loaded)


def brought_module(loaded: Loaded) -> Mtp:
    """Returns the module in a target's folder; ``UnsupportedModel`` where there is none."""
    found = read_nextn(loaded)
    size = loaded.config.hidden_size
    parts = Parts(
        found.enorm, found.hnorm, found.eh_proj, _OfTarget(found.block, size), found.post_norm
    )
    shape = TargetShape.of(loaded.config, loaded.name)
    head = Mtp(shape, MtpConfig(), parts, states_first=found.states_first)
    return head.to(loaded.device).eval().requires_grad_(False)


class _OfTarget(nn.Module):
    """A layer of the target's own kind, as heads use layers."""

    def __init__(self, block: NextNBlock, size: int) -> None:
        super().__init__()
        self.block = block
        # Its keys and values may differ in width: one column shows it.
        weight = next(block.parameters())
        with torch.no_grad():
            _, (keys, values) = block(
                weight.new_zeros(1, 1, size),
                torch.zeros(1, 1, dtype=torch.long, device=weight.device),
                None,
                torch.ones(1, 1, 1, dtype=torch.bool, device=weight.device),
            )
        self._none = Entries(keys[:, :, :0], values[:, :, :0])

    def begin(self, rows: int) -> Entries:
        """Returns no entries of n rows."""
        none = self._none
        return Entries(
            none.keys.expand(rows, -1, -1, -1).clone(), none.values.expand(rows, -1, -1, -1).clone()
        )

    def forward(self, x: Tensor, sight: Sight) -> tuple[Tensor, Entries]:
        """As `heads.layers.DecoderLayer`."""
        before = sight.before.keys, sight.before.values
        found, own = self.block(x, sight.positions, before, sight.visible)
        return found, Entries(*own)
