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
    Head,
    HeadConfig,
    Shared,
    TargetOutput,
    TargetShape,
    begin_as_last,
    config_of,
)
from outpace.heads.checkpoint import Content, Format, architectures
from outpace.heads.folder import Folder
from outpace.heads.layers import DecoderLayer, Entries, LayerConfig, Norm, Sight
from outpace.methods.heads.blocks import BlockHead, BlockHeadDrafter
from outpace.methods.heads.published import (
    about_layers,
    check_only,
    knows_all,
    layer_sizes,
    renamed,
    without_derived,
)
from outpace.targets.hf.loading.loaded import Loaded

# -- the network -----------------------------------------------------------------------------------


DEEP = 8
"""Layers from which on a target's states are taken where the published code takes them."""


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(LayerConfig):
    """What a DFlash head is built from. Sizes that are 0 follow from the target's width."""

    depths: int = 7
    """Tokens after the root that it guesses: a block has one more."""
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
        self._reads = tuple(config.reads) or layers_read(target.layers, config.layers)
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
        begin_as_last(self.fc)

    @property
    def first_layer(self) -> DecoderLayer:
        return self._layers[0]

    @property
    def _layers(self) -> list[DecoderLayer]:
        return cast(list[DecoderLayer], list(self.stack))

    def _embedded(self, roots: Tensor, shared: Shared) -> Tensor:
        """``[B, A, W, H]``: the roots ``[B, A]``, each with its masks after it."""
        first = shared.embed(roots).to(self.dtype)[:, :, None]
        if self.mask is None:
            mask = shared.embed(roots.new_full((1,), self._mask_token))[0].to(self.dtype)
        else:
            mask = self.mask
        return torch.cat([first, mask.expand(*roots.shape, self.config.depths, -1)], 2)


def layers_read(layers: int, count: int) -> tuple[int, ...]:
    """Returns the states that a head with ``count`` layers reads of a target with ``layers``.

    They are evenly spread, as in the published code: the first is the one after the second layer,
    the last the one after the last layer but two. A target with few layers is read from after its
    first layer to its last states, at as many places as there are.

    >>> layers_read(36, 5), layers_read(2, 5)
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


# -- its published format --------------------------------------------------------------------------

# DFlash's published heads: ``config.json`` as of a Qwen3 model with a few layers.
#
# The weights are ``fc``, ``hidden_norm``, ``layers`` and ``norm``; embeddings and output matrix are
# the target's. ``block_size`` counts the root; ``dflash_config`` says which token stands for a mask
# and after which of the target's layers, numbered from 0, the states are taken.


ARCHITECTURE, ABOUT = "DFlashDraftModel", "dflash_config"
OWN, PUBLIC = {"layers.": "stack."}, {"stack.": "layers."}
ONLY: Mapping[str, Any] = {"attention_bias": False, "use_sliding_window": False}


class DFlashFormat(Format):
    """The target is known by its width, its vocabulary and its number of layers."""

    name: ClassVar[str] = "dflash"

    @classmethod
    def recognises(cls, about: Mapping[str, Any]) -> bool:
        return ARCHITECTURE in architectures(about) or ABOUT in about

    @classmethod
    def read(cls, folder: Folder, about: Mapping[str, Any]) -> Head:
        weights = renamed(without_derived(folder.read_weights("model.safetensors")), OWN)
        with folder.describing("dflash"):
            check_only(about, ONLY)
            target = TargetShape(
                about["hidden_size"], about["vocab_size"], about.get("num_target_layers") or 0
            )
            head = DFlash(target, _config(about, target.layers))
        return folder.fill(head, {**weights, "d2t": head.d2t})

    @classmethod
    def write(cls, head: Head) -> Content:
        if not isinstance(head, DFlash):
            raise cls.refuse(f"holds no {head.kind} heads")
        if head.lm_head is not None or not knows_all(head):
            raise cls.refuse("holds heads that know all tokens only")
        if head.mask is not None:
            raise cls.refuse(
                "holds heads whose masks are a token of the target only (--set own_mask=false and "
                "--set mask_token=N when it is trained)"
            )
        weights = renamed(head.state_dict(), PUBLIC)
        del weights["d2t"]
        return Content(_about(head), weights)


def _config(about: Mapping[str, Any], target_layers: int) -> DFlashConfig:
    inside = about.get(ABOUT) or {}
    for kind in about.get("layer_types") or ():
        if kind != "full_attention":
            raise ValueError(f"a layer is of the type {kind!r}, and only 'full_attention' is known")
    layers = about["num_hidden_layers"]
    block = about.get("block_size") or inside.get("block_size")
    reads = inside.get("target_layer_ids")
    if not isinstance(block, int) or not isinstance(inside.get("mask_token_id"), int):
        raise ValueError("it says no block_size or no mask_token_id")
    if reads is None and not target_layers:
        raise ValueError("it says neither target_layer_ids nor num_target_layers")
    own = layers_read(target_layers, layers) if reads is None else [at + 1 for at in reads]
    given = {
        **layer_sizes(about),
        "depths": block - 1,
        "layers": layers,
        "reads": [*own],
        "own_mask": False,
        "mask_token": inside["mask_token_id"],
    }
    return config_of(DFlashConfig, given)


def _about(head: DFlash) -> dict[str, Any]:
    config, layer = head.config.as_dict(), head.first_layer
    count, target = config["layers"], head.target
    # The last states are those after the last layer; a file counts layers from 0.
    taken = [(target.layers if at == -1 else at) - 1 for at in head.layers]
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        **about_layers(head, layer.self_attn, layer.mlp.up_proj.out_features, count),
        "attention_bias": False,
        "use_sliding_window": False,
        "layer_types": ["full_attention"] * count,
        "block_size": config["depths"] + 1,
        "num_target_layers": target.layers,
        ABOUT: {"mask_token_id": config["mask_token"], "target_layer_ids": taken},
    }
