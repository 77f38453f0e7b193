"""Multi-token prediction: one decoder layer that goes on where the target's last one ends.

DeepSeek-AI 2024, "DeepSeek-V3", arXiv 2412.19437, section 2.2. A module that is used again and
again, on its own outputs, is FastMTP (Cai et al. 2025, arXiv 2509.18362).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from outpace.core.options import Reads
from outpace.draft.base import Setup
from outpace.errors import ConfigError
from outpace.heads.base import Head, HeadConfig, Shared, TargetOutput, TargetShape, begin_as_last
from outpace.heads.layers import DecoderLayer, Entries, LayerConfig, Norm, Sight
from outpace.methods.heads.attending import AttendingHead, AttendingHeadDrafter
from outpace.methods.heads.base import TreeHeadOptions, trained_head
from outpace.targets.hf.loading.loaded import Loaded
from outpace.targets.hf.loading.nextn import NextNBlock, read_nextn

# -- the network -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MtpConfig(LayerConfig):
    """What a module is built from. Sizes that are 0 follow from the target's width."""

    depths: int = 3
    """Tokens after the root that it is trained for; it drafts as far as it is asked to."""


class Block(Protocol):
    """A decoder layer."""

    def begin(self, rows: int) -> Entries:
        """Returns no entries of ``rows`` rows."""

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
        begin_as_last(self.eh_proj)


# -- how it drafts ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MtpOptions(TreeHeadOptions):
    """What a user may set."""

    model: Annotated[Any, Reads(trained_head)] = None
    """A module of 'outpace train mtp'; unset: the one that the target's folder brings."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.online is not None and self.model is None:
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
        """Returns no entries of ``rows`` rows."""
        none = self._none
        return Entries(
            none.keys.expand(rows, -1, -1, -1).clone(), none.values.expand(rows, -1, -1, -1).clone()
        )

    def forward(self, x: Tensor, sight: Sight) -> tuple[Tensor, Entries]:
        """As `heads.layers.DecoderLayer`."""
        before = sight.before.keys, sight.before.values
        found, own = self.block(x, sight.positions, before, sight.visible)
        return found, Entries(*own)
