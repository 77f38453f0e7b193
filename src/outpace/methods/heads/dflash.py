"""The method "dflash": a trained head drafts (`heads.blocks.dflash`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from outpace.methods.heads.blocks import BlockHeadDrafter
from outpace.targets.hf.loading.loaded import Loaded


class DFlashDrafter(BlockHeadDrafter):
    """Drafts with a `DFlash` head."""

    name: ClassVar[str] = "dflash"

    @classmethod
    def specimen(cls, loaded: Loaded) -> Mapping[str, Any]:
        """A head that was never trained guesses nothing right, whatever it is made of. This one
        sees the mean of the text's states in each layer, and so guesses what comes often."""
        options = super().specimen(loaded)
        parts = options["model"].named_parameters()
        for name, weight in parts:
            if name.endswith("q_proj.weight"):
                weight.zero_()
            elif name.endswith(("v_proj.weight", "o_proj.weight")):
                weight.copy_(torch.eye(*weight.shape) * (3 if "o_proj" in name else 1))
            elif name.endswith("down_proj.weight"):
                weight.mul_(0.1)
        return options
