"""DFlash: a few decoder layers over a block of masks, which see the target's states as context.

Chen et al. 2026, arXiv 2602.06036. The parts are named as in the published checkpoints, but for the
layers, which are called ``stack`` here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from outpace.heads.attending.base import Entries, Sight
from outpace.heads.base import HeadConfig, Shared, TargetShape
from outpace.heads.blocks.base import BlockHead
from outpace.heads.layers import DecoderLayer, LayerConfig, Norm
from outpace.heads.output import TargetOutput

DEEP = 8
"""Layers from which on a target's states are taken where the published code takes them."""


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(LayerConfig):
    """What a DFlash head is built from. Sizes that are 0 follow from the target's width."""

    depths: int = 7
    """Tokens behind the root that it guesses: a block has one more."""
    layers: int = 5
    """Its own decoder layers."""
    reads: list[int] = field(default_factory=list)
    """The target's layers that it reads; none: as `DFlash.layers` says."""
    own_mask: bool = True
    """Whether masks have an embedding of their own, and not that of a token of the target."""
    mask_token: int = 0
    """That token, where they have not."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers < 1 or self.depths < 1:
            raise ValueError(f"{self.layers} layers for blocks of {self.depths} masks")
        if any(type(at) is not int for at in self.reads):
            raise ValueError(f"reads is {self.reads!r}, and not layers of the target")
        if self.own_mask and self.mask_token:
            raise ValueError("mask_token is given, and own_mask says that it is not used")


class DFlash(TargetOutput, BlockHead):
    """The target's embedding of the root and of masks go through Qwen3's layers.

    In each layer, keys and values of the text are those of a blend of the target's states, the same
    one for all layers. The target's own output matrix makes the logits; a head that knows few
    tokens only has a copy of their rows.
    """

    kind: ClassVar[str] = "dflash"
    Config: ClassVar[type[HeadConfig]] = DFlashConfig

    def __init__(self, target: TargetShape, config: DFlashConfig) -> None:
        super().__init__(target, config)
        size, eps = target.hidden_size, config.norm_eps
        if config.mask_token >= target.vocab_size:
            raise ValueError(f"mask_token is {config.mask_token} of {target.vocab_size} tokens")
        self._reads = tuple(config.reads) or spread(target.layers, config.layers)
        self._mask_token = config.mask_token
        self.fc = nn.Linear(len(self._reads) * size, size, bias=False)
        self.hidden_norm = Norm(size, eps=eps)
        self.stack = nn.ModuleList(
            DecoderLayer(size, config, normed=True) for _ in range(config.layers)
        )
        self.norm = Norm(size, eps=eps)
        self.mask = nn.Parameter(torch.randn(size) * size**-0.5) if config.own_mask else None
        self.lm_head = self.copy_of_rows()

    @property
    def layers(self) -> tuple[int, ...]:
        return self._reads

    def begin(self, rows: int) -> Entries:
        return Entries.of_layers([layer.begin(rows) for layer in self._layers])

    def entries(self, states: Tensor, positions: Tensor) -> Entries:
        context = self.hidden_norm(self.fc(states.to(self.dtype)))
        found = [layer.self_attn.entries(context, positions) for layer in self._layers]
        return Entries.of_layers(found)

    def block(
        self, roots: Tensor, positions: Tensor, before: Entries, visible: Tensor, shared: Shared
    ) -> Tensor:
        (rows, count), wide = roots.shape, self.config.depths + 1
        x = self._embedded(roots, shared).flatten(1, 2)  # [B, A W, H]
        at = positions[..., None] + torch.arange(wide, device=positions.device)
        block = torch.arange(count, device=positions.device).repeat_interleave(wide)
        own = (block == block[:, None]).expand(rows, -1, -1)
        seen = torch.cat([visible.repeat_interleave(wide, 1), own], -1)  # [B, A W, L + A W]
        text = before.by_layer(len(self.stack))
        for layer, entries in zip(self._layers, text, strict=True):
            x, _ = layer(x, Sight(at.flatten(1), entries, seen))
        guessed = self.norm(x).view(rows, count, wide, -1)[:, :, 1:]
        return self.read_out(guessed, shared)

    @torch.no_grad()
    def begin_from(self, shared_head: Tensor | None) -> None:
        """The text begins as the highest of the states; a copy of the target's rows stays as it
        is."""
        super().begin_from(shared_head)
        size = self.target.hidden_size
        self.fc.weight.zero_()
        self.fc.weight[:, -size:].copy_(torch.eye(size))

    @property
    def first_layer(self) -> DecoderLayer:
        return self._layers[0]

    @property
    def _layers(self) -> list[DecoderLayer]:
        return cast(list[DecoderLayer], list(self.stack))

    def _embedded(self, roots: Tensor, shared: Shared) -> Tensor:
        """``[B, A, W, H]``: the roots ``[B, A]``, each with its masks behind it."""
        first = shared.embed(roots).to(self.dtype)[:, :, None]
        if self.mask is None:
            mask = shared.embed(roots.new_full((1,), self._mask_token))[0].to(self.dtype)
        else:
            mask = self.mask
        return torch.cat([first, mask.expand(*roots.shape, self.config.depths, -1)], 2)


def spread(layers: int, count: int) -> tuple[int, ...]:
    """Returns the states that a head with ``count`` layers reads of a target with n layers.

    They are evenly spread, as in the published code: the first is the one behind the second layer,
    the last the one behind the last layer but two. A target with few layers is read from behind its
    first layer to its last states, at as many places as there are.

    >>> spread(36, 5), spread(2, 5)
    ((2, 10, 18, 26, 34), (1, -1))
    """
    if count == 1:
        return (layers // 2 + 1,) if layers >= DEEP else (-1,)
    first, last = (2, layers - 2) if layers >= DEEP else (1, layers)
    places = {round(first + i * (last - first) / (count - 1)) for i in range(count)}
    return tuple(-1 if at == layers else at for at in sorted(places))
