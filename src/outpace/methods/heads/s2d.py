"""The method "s2d": a small decoder drafts with as many of its layers as it takes
(`heads.attending.s2d`)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch

from outpace.core.options import option
from outpace.core.values import number
from outpace.draft.base import Setup
from outpace.errors import ConfigError
from outpace.heads.attending.s2d import S2d, S2dConfig
from outpace.heads.base import Head, TargetShape
from outpace.methods.heads.attending import AttendingHeadDrafter
from outpace.methods.heads.base import NOISE, TreeHeadOptions
from outpace.targets.hf.loading.loaded import Loaded


@dataclass(frozen=True, kw_only=True)
class S2dOptions(TreeHeadOptions):
    """What a user may set."""

    confidence: float | None = option(
        None,
        "The probability of its first guess with which a part is content: 0 always drafts with the "
        "smallest, 1 with all layers; unset: as it was trained.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.confidence is not None:
            number("confidence", self.confidence, 0, 1, closed=True, error=ConfigError)


class S2dDrafter(AttendingHeadDrafter):
    """Drafts with an `S2d`.

    Which part guesses is decided from the distributions of the smaller ones before anything is
    drawn, so that a token was drawn from the distribution that it comes with.
    """

    name: ClassVar[str] = "s2d"
    Options: ClassVar[type[Any]] = S2dOptions

    @classmethod
    def head_for(cls, setup: Setup) -> Head:
        head = cast(S2d, super().head_for(setup))
        if setup.options.confidence is not None:
            head = copy.copy(head)  # the same weights
            head.confidence = float(setup.options.confidence)
        return head

    @classmethod
    def specimen(cls, loaded: Loaded) -> Mapping[str, Any]:
        """The target itself, if it is a Llama, with weights that are a little off."""
        given, model = loaded.config, cast(Any, loaded.model)
        config = S2dConfig(
            depths=3,
            width=given.hidden_size,
            layers=given.num_hidden_layers,
            first=1,
            every=1,
            confidence=0.4,
            heads=given.num_attention_heads,
            groups=getattr(given, "num_key_value_heads", None) or 0,
            inner_size=getattr(given, "intermediate_size", None) or 0,
        )
        torch.manual_seed(0)
        head = S2d(TargetShape.of(given, "a specimen"), config).to(loaded.dtype).eval()
        own = head.requires_grad_(False).state_dict()
        for name, value in model.state_dict().items():
            name = name.removeprefix("model.").replace("layers.", "stack.", 1)
            if name in own and own[name].shape == value.shape:
                own[name].copy_(value)
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=NOISE)
        return {"model": head}
