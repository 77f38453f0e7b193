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
    FULL,
    about_layers,
    check_only,
    knows_all,
    layer_sizes,
    own_d2t,
    public_d2t,
    renamed,
    windows,
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
    """Tokens after the root that it guesses."""
    sample_from_anchor: bool = False
    """Whether the root's place in a block says which token follows, too, and each mask's which
    token follows that; if not, a mask stands for a token, and a block has one place more."""
    layers: int = 5
    """Its own decoder layers."""
    reads: list[int] = field(default_factory=list)
    """The target's layers that it reads; none: as `DFlash.layers` says."""
    own_mask: bool = True
    """Whether masks have an embedding of their own, and not that of a token of the target."""
    mask_token: int = 0
    """That token, where they have not."""
    own_embedding: bool = False
    """Whether it has embeddings of its own instead of the target's."""
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
    config: DFlashConfig

    def __init__(self, target: TargetShape, config: DFlashConfig) -> None:
        super().__init__(target, config)
        size, eps = target.hidden_size, config.norm_eps
        if config.mask_token >= target.vocab_size:
            raise ValueError(f"mask_token is {config.mask_token} of {target.vocab_size} tokens")
        self._reads = tuple(config.reads) or layers_read(target.layers, config.layers)
        self._mask_token = config.mask_token
        self.fc = nn.Linear(len(self._reads) * size, size, bias=False)
        self.hidden_norm = Norm(size, eps=eps)
        self.stack = nn.ModuleList(self.new_layer(size, config) for _ in range(config.layers))
        self.norm = Norm(size, eps=eps)
        self.mask = nn.Parameter(torch.randn(size) * size**-0.5) if config.own_mask else None
        self.lm_head = self.copy_of_rows()
        self.embed_tokens = nn.Embedding(target.vocab_size, size) if config.own_embedding else None

    def new_layer(self, size: int, config: LayerConfig) -> DecoderLayer:
        """Returns one of its layers."""
        return DecoderLayer(size, config, normed=True)

    @property
    def layers(self) -> tuple[int, ...]:
        return self._reads

    def begin(self, rows: int) -> Entries:
        return Entries.of_layers([layer.begin(rows) for layer in self._layers])

    def entries(self, states: Tensor, positions: Tensor) -> Entries:
        context = self.hidden_norm(self.fc(states.to(self.dtype)))
        found = [layer.self_attn.entries(context, positions) for layer in self._layers]
        return Entries.of_layers(found)

    @property
    def block_size(self) -> int:
        """Places of a block, the root's among them."""
        return self.config.depths + (not self.config.sample_from_anchor)

    def outputs(
        self, roots: Tensor, positions: Tensor, before: Entries, visible: Tensor, shared: Shared
    ) -> Tensor:
        (rows, count), wide = roots.shape, self.block_size
        x = self._embedded(roots, shared).flatten(1, 2)  # [B, A W, H]
        at = positions[..., None] + torch.arange(wide, device=positions.device)
        block = torch.arange(count, device=positions.device).repeat_interleave(wide)
        own = block == block[:, None]  # [A W, A W]
        text = before.by_layer(len(self.stack))
        config = self.config
        for number, (layer, entries) in enumerate(zip(self._layers, text, strict=True)):
            read = _in_window(visible, wide, config.windows[number] if config.windows else 0)
            within = own.tril() if config.causal and config.causal[number] else own
            seen = torch.cat([read, within.expand(rows, -1, -1)], -1)  # [B, A W, L + A W]
            x, _ = layer(x, Sight(at.flatten(1), entries, seen))
        found: Tensor = self.norm(x).view(rows, count, wide, -1)
        return found[:, :, -config.depths :]

    def logits(self, outputs: Tensor, shared: Shared) -> Tensor:
        return self.read_out(outputs, shared)

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
        embed = shared.embed if self.embed_tokens is None else self.embed_tokens
        first = embed(roots).to(self.dtype)[:, :, None]
        if self.mask is None:
            mask = embed(roots.new_full((1,), self._mask_token))[0].to(self.dtype)
        else:
            mask = self.mask
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
# mostly the target's. ``block_size`` counts the root; ``dflash_config``, or entries in its place,
# says which token stands for a mask and after which of the target's layers, numbered from 0, the
# states are taken. A head that knows some tokens only brings ``lm_head`` and ``d2t``.


ARCHITECTURE, ABOUT = "DFlashDraftModel", "dflash_config"
OWN, PUBLIC = {"layers.": "stack."}, {"stack.": "layers."}
ONLY: Mapping[str, Any] = {
    "attention_bias": False,
    "projector_type": None,
    "pure_draft_prefix_len": 0,
}
"""Entries by which a head that is built otherwise, and cannot be read, is recognised: among
them Domino's."""
ANCHOR = ("sample_from_anchor", "shift_label")
"""Entries that say that the root's place guesses, too."""


class DFlashFormat(Format):
    """The target is known by its width, its vocabulary and its number of layers."""

    name: ClassVar[str] = "dflash"

    @classmethod
    def recognises(cls, about: Mapping[str, Any]) -> bool:
        return ARCHITECTURE in architectures(about) or ABOUT in about

    @classmethod
    def read(cls, folder: Folder, about: Mapping[str, Any]) -> Head:
        weights = folder.read_weights("model.safetensors")
        with folder.describing("dflash"):
            if (found := architectures(about)) and ARCHITECTURE not in found:
                raise ValueError(f"its architecture is {sorted(found)}, and only DFlash is known")
            head, weights = dflash_head(about, weights)
        return folder.fill(head, weights)

    @classmethod
    def write(cls, head: Head) -> Content:
        if type(head) is not DFlash:
            raise cls.refuse(f"holds no {head.kind} heads")
        return Content(about_dflash(head, cls), dflash_weights(head))


def dflash_head(
    about: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    kind: type[DFlash] = DFlash,
    more: Mapping[str, Any] | None = None,
) -> tuple[DFlash, dict[str, Tensor]]:
    """Returns a head, still without its weights, from its public configuration, and these by our
    names. Raises one of `heads.folder.UNFIT` where they do not fit.

    kind: which has more parts, maybe, the sizes of which are ``more``.
    """
    inside = about.get(ABOUT) or {}
    check_only({**about, **inside}, ONLY)
    found = renamed(without_derived(weights), OWN)
    size, layers = about["hidden_size"], about.get("num_target_layers") or 0
    if about.get("target_hidden_size") not in (None, size):
        raise ValueError("its width is not its target's")
    target = TargetShape(size, about["vocab_size"], layers)
    given = {**_config(about, {**about, **inside}, layers, found), **(more or {})}
    head = kind(target, cast(DFlashConfig, config_of(kind.Config, given)))
    d2t = own_d2t(found, head)
    return head, {**found, "d2t": d2t}


def _config(
    about: Mapping[str, Any],
    entries: Mapping[str, Any],
    target_layers: int,
    weights: Mapping[str, Tensor],
) -> dict[str, Any]:
    layers = about["num_hidden_layers"]
    block, reads = entries.get("block_size"), entries.get("target_layer_ids")
    if not isinstance(block, int) or not isinstance(entries.get("mask_token_id"), int):
        raise ValueError("it says no block_size or no mask_token_id")
    if reads is None and not target_layers:
        raise ValueError("it says neither target_layer_ids nor num_target_layers")
    own = layers_read(target_layers, layers) if reads is None else [at + 1 for at in reads]
    limited = _windows(about, entries, layers)
    anchor = any(entries.get(name) for name in ANCHOR)
    return {
        **layer_sizes(about),
        "depths": block - (not anchor),
        "sample_from_anchor": anchor,
        "layers": layers,
        "reads": [*own],
        "own_mask": False,
        "mask_token": entries["mask_token_id"],
        "draft_vocab_size": len(weights["lm_head.weight"]) if "lm_head.weight" in weights else 0,
        "own_embedding": "embed_tokens.weight" in weights,
        "windows": limited,
        "causal": _causal(entries, limited),
    }


def _windows(about: Mapping[str, Any], entries: Mapping[str, Any], layers: int) -> list[int]:
    """How far each layer sees; nothing where all see all."""
    if not entries.get("use_swa"):
        if about.get("use_sliding_window") and not about.get("layer_types"):
            raise ValueError("its use_sliding_window is true, and it has no layer_types")
        return windows(about, layers)
    window = entries.get("swa_window_size") or about.get("sliding_window")
    if type(window) is not int or window < 1:
        raise ValueError(f"its swa_window_size is {window!r}")
    return [window] * layers


CAUSAL = ("is_causal", "causal")
"""Entries that say of all layers whether a token of a block sees only those before it."""


def _causal(entries: Mapping[str, Any], limited: list[int]) -> list[bool]:
    """Whether each layer's tokens see only those of their block that come before them; nothing
    where all see the whole block. Where no entry says it, those with windows do (vLLM)."""
    if entries.get("sliding_window_non_causal"):
        return []
    said = [entries[name] for name in CAUSAL if entries.get(name) is not None]
    if said:
        return [True] * entries["num_hidden_layers"] if said[0] else []
    return [bool(window) for window in limited] if not entries.get("use_swa") else []


def dflash_weights(head: DFlash) -> dict[str, Tensor]:
    """Returns a head's weights by their public names."""
    maps = {"d2t", "t2d"} if knows_all(head) else set()
    weights = renamed(public_d2t(head), PUBLIC)
    return {name: value for name, value in weights.items() if name not in maps}


def about_dflash(head: DFlash, form: type[Format]) -> dict[str, Any]:
    """Returns the public configuration of a head. form: which refuses what it has no words for."""
    if head.mask is not None:
        raise form.refuse(
            "holds heads whose masks are a token of the target only (--set own_mask=false and "
            "--set mask_token=N when it is trained)"
        )
    config, layer, target = head.config, head.first_layer, head.target
    # The last states are those after the last layer; a file counts layers from 0.
    taken = [(target.layers if at == -1 else at) - 1 for at in head.layers]
    inside: dict[str, Any] = {"mask_token_id": config.mask_token, "target_layer_ids": taken}
    usual = [bool(window) for window in config.windows]
    if config.causal != usual:
        if len(set(config.causal)) > 1:
            raise form.refuse("has no words for layers some of which are causal")
        inside["causal"] = any(config.causal)
    about = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        **about_layers(head, layer.self_attn, layer.mlp.up_proj.out_features, config.layers),
        "attention_bias": False,
        "block_size": head.block_size,
        "num_target_layers": target.layers,
        ABOUT: inside,
    }
    if config.draft_vocab_size:
        about["draft_vocab_size"] = config.draft_vocab_size
    if config.sample_from_anchor:
        about[ANCHOR[0]] = True
    full = {"use_sliding_window": False, "layer_types": [FULL] * config.layers}
    return about if config.windows else {**about, **full}
