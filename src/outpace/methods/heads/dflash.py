"""DFlash: a few decoder layers over a block of masks, which see the target's states as context.

Chen et al. 2026, arXiv 2602.06036. The parts are named as in the published checkpoints, but for the
layers, which are called ``stack`` here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from outpace.heads.base import (
    HeadConfig,
    SharedLMHeadMixin,
    SharedModules,
    TargetShape,
    init_identity_on_last,
)
from outpace.heads.decoder import DecoderLayer
from outpace.heads.layers import AttentionContext, KeyValues, LayerConfig, RMSNorm
from outpace.methods.heads.blocks import BlockHead, BlockHeadDrafter
from outpace.methods.heads.gemma4_layer import Gemma4Layer
from outpace.targets.hf.loading.loaded import LoadedModel

# -- the network -----------------------------------------------------------------------------------


QWEN3, GEMMA4 = "qwen3", "gemma4"

DEEP = 8
"""Layers from which on a target's states are taken where the published code takes them."""


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(LayerConfig):
    """What a DFlash head is built from. Sizes that are 0 follow from the target's width."""

    depths: int = 7
    """Tokens after the root that it guesses."""
    sample_from_anchor: bool = False
    """Whether the root's place in a block says which token follows, too, and each mask's which
    token follows that; if not, a mask stands for a token, and a block has one place more."""
    layers: int = 5
    """Its own decoder layers."""
    reads: list[int] = field(default_factory=list)
    """The target's layers that it reads; none: as `DFlash.hidden_layers` says."""
    own_mask: bool = True
    """Whether masks have an embedding of their own, and not that of a token of the target."""
    mask_token: int = 0
    """That token, where they have not."""
    own_embedding: bool = False
    """Whether it has embeddings of its own instead of the target's."""
    input_embedding_scale: float = 1.0
    """What embeddings are multiplied with."""
    family: str = QWEN3
    """Whose layers it has: "qwen3" or "gemma4"."""
    bias: bool = False
    """Whether queries, keys, values and the output projection have biases."""
    shared_values: bool = False
    """Whether values are made by the matrix that makes keys, in layers of Gemma 4."""
    windows: list[int] = field(default_factory=list)
    """How many tokens back each layer sees of the text, 0 for all; its block is seen whatever the
    window. None given: all layers see all of the text."""
    causal: list[bool] = field(default_factory=list)
    """Whether each layer sees only those tokens of its block that come before a token, and itself;
    none: all layers see the whole block."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("windows", "causal"):
            if (given := getattr(self, name)) and len(given) != self.layers:
                raise ValueError(f"{name} is {given!r}, and it has {self.layers} layers")
        if self.layers < 1 or self.depths < 1:
            raise ValueError(f"{self.layers} layers for blocks of {self.depths} masks")
        if any(type(at) is not int for at in self.reads):
            raise ValueError(f"reads is {self.reads!r}, and not layers of the target")
        if self.family not in (QWEN3, GEMMA4):
            raise ValueError(f"family is {self.family!r}, and only qwen3 and gemma4 are known")
        if self.bias and self.family == GEMMA4:
            raise ValueError("bias is true, and layers of Gemma 4 have none")
        if not self.input_embedding_scale:
            raise ValueError("input_embedding_scale is 0")
        if self.own_mask and self.mask_token:
            raise ValueError("mask_token is given, and own_mask says that it is not used")


class DFlash(SharedLMHeadMixin, BlockHead):
    """The target's embedding of the root and of masks go through Qwen3's layers.

    In each layer, keys and values of the text are those of a blend of the target's states, the same
    one for all layers. The target's own output matrix makes the logits; a head that knows few
    tokens only has a copy of their rows.
    """

    kind: ClassVar[str] = "dflash"
    Config: ClassVar[type[HeadConfig]] = DFlashConfig
    config: DFlashConfig

    def __init__(self, target: TargetShape, config: DFlashConfig) -> None:
        super().__init__(target, config)
        size, eps = target.hidden_size, config.norm_eps
        if config.mask_token >= target.vocab_size:
            raise ValueError(f"mask_token is {config.mask_token} of {target.vocab_size} tokens")
        self._reads = tuple(config.reads) or build_target_layer_ids(target.layers, config.layers)
        self._mask_token = config.mask_token
        self.fc = nn.Linear(len(self._reads) * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps=eps)
        self.stack = nn.ModuleList(self.new_layer(size, config) for _ in range(config.layers))
        self.norm = RMSNorm(size, eps=eps)
        self.mask = nn.Parameter(torch.randn(size) * size**-0.5) if config.own_mask else None
        self.lm_head = self.new_draft_lm_head()
        self.embed_tokens = nn.Embedding(target.vocab_size, size) if config.own_embedding else None

    def new_layer(self, size: int, config: LayerConfig) -> DecoderLayer:
        """Returns one of its layers."""
        if self.config.family == GEMMA4:
            return Gemma4Layer(size, config, self.config.shared_values)
        bias = self.config.bias
        return DecoderLayer(size, config, bias=bias, output_bias=bias, normed=True)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self._reads

    def begin(self, rows: int) -> KeyValues:
        return KeyValues.join_layers([layer.begin(rows) for layer in self._layers])

    def entries(self, states: Tensor, positions: Tensor) -> KeyValues:
        context = self.context(states)
        found = [layer.self_attn.entries(context, positions) for layer in self._layers]
        return KeyValues.join_layers(found)

    def context(self, states: Tensor) -> Tensor:
        """Returns the blend ``[..., H]`` of the target's states ``[..., len(layers) H]``."""
        found: Tensor = self.hidden_norm(self.fc(states.to(self.dtype)))
        return found

    @property
    def block_size(self) -> int:
        """Places of a block, the root's among them."""
        return self.config.depths + (not self.config.sample_from_anchor)

    def outputs(
        self,
        roots: Tensor,
        positions: Tensor,
        before: KeyValues,
        visible: Tensor,
        shared: SharedModules,
    ) -> Tensor:
        (rows, count), wide = roots.shape, self.block_size
        x = self._embedded(roots, shared).flatten(1, 2)  # [B, A W, H]
        at = positions[..., None] + torch.arange(wide, device=positions.device)
        block = torch.arange(count, device=positions.device).repeat_interleave(wide)
        own = block == block[:, None]  # [A W, A W]
        text = before.split_layers(len(self.stack))
        config = self.config
        for number, (layer, entries) in enumerate(zip(self._layers, text, strict=True)):
            read = _in_window(visible, wide, config.windows[number] if config.windows else 0)
            within = own.tril() if config.causal and config.causal[number] else own
            seen = torch.cat([read, within.expand(rows, -1, -1)], -1)  # [B, A W, L + A W]
            x, _ = layer(x, AttentionContext(at.flatten(1), entries, seen))
        found: Tensor = self.norm(x).view(rows, count, wide, -1)
        return found[:, :, -config.depths :]

    def logits(self, outputs: Tensor, shared: SharedModules) -> Tensor:
        return self.compute_logits(outputs, shared)

    @torch.no_grad()
    def init_from_lm_head(self, shared_head: Tensor | None) -> None:
        """The text begins as the highest of the states; a copy of the target's rows stays as it
        is."""
        super().init_from_lm_head(shared_head)
        init_identity_on_last(self.fc)

    @property
    def first_layer(self) -> DecoderLayer:
        return self._layers[0]

    @property
    def _layers(self) -> list[DecoderLayer]:
        return cast(list[DecoderLayer], list(self.stack))

    def embedded(self, tokens: Tensor, shared: SharedModules) -> Tensor:
        """Returns the embeddings ``[..., H]`` of tokens ``[...]`` that it reads."""
        embed = shared.embed if self.embed_tokens is None else self.embed_tokens
        return embed(tokens).to(self.dtype)

    def _embedded(self, roots: Tensor, shared: SharedModules) -> Tensor:
        """``[B, A, W, H]``: the roots ``[B, A]``, each with its masks after it."""
        of_table = of_mask = self.config.input_embedding_scale
        if of_table != 1.0 and self.embed_tokens is None:  # it is of the target's rows as they are
            of_table /= shared.embedding_scale
        first = self.embedded(roots, shared)[:, :, None] * of_table
        if self.mask is None:
            mask = self.embedded(roots.new_full((1,), self._mask_token), shared)[0] * of_table
        else:
            mask = self.mask * of_mask
        return torch.cat([first, mask.expand(*roots.shape, self.block_size - 1, -1)], 2)


def _in_window(visible: Tensor, wide: int, window: int) -> Tensor:
    """Which entries ``[B, A W, L]`` the tokens of blocks attend to, of those that are visible to
    the blocks, ``[B, A, L]``: all, or those less than a window before the token."""
    if not window:
        return visible.repeat_interleave(wide, 1)
    back = visible.flip(-1).cumsum(-1).flip(-1)  # how far before the root, 1 for the last one
    offsets = torch.arange(wide, device=visible.device)[:, None]
    near = (back[:, :, None] + offsets < window) & visible[:, :, None]
    return near.flatten(1, 2)


def build_target_layer_ids(layers: int, count: int) -> tuple[int, ...]:
    """Returns the states that a head with ``count`` layers reads of a target with ``layers``.

    They are evenly spread, as in the published code: the first is the one after the second layer,
    the last the one after the last layer but two. A target with few layers is read from after its
    first layer to its last states, at as many places as there are.

    >>> build_target_layer_ids(36, 5), build_target_layer_ids(2, 5)
    ((2, 10, 18, 26, 34), (1, -1))
    """
    if count == 1:
        return (layers // 2 + 1,) if layers >= DEEP else (-1,)
    first, last = (2, layers - 2) if layers >= DEEP else (1, layers)
    places = {round(first + i * (last - first) / (count - 1)) for i in range(count)}
    return tuple(-1 if at == layers else at for at in sorted(places))


# -- how it drafts ---------------------------------------------------------------------------------


class DFlashDrafter(BlockHeadDrafter):
    """Drafts with a `DFlash` head."""

    name: ClassVar[str] = "dflash"

    @classmethod
    def dummy_options(cls, loaded: LoadedModel) -> Mapping[str, Any]:
        """A head that was never trained guesses nothing right, whatever it is made of. This one
        sees the mean of the text's states in each layer, and so guesses what comes often."""
        options = super().dummy_options(loaded)
        parts = options["model"].named_parameters()
        for name, weight in parts:
            if name.endswith("q_proj.weight"):
                weight.zero_()
            elif name.endswith(("v_proj.weight", "o_proj.weight")):
                weight.copy_(torch.eye(*weight.shape) * (3 if "o_proj" in name else 1))
            elif name.endswith("down_proj.weight"):
                weight.mul_(0.1)
        return options
