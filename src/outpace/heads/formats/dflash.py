"""DFlash's published heads: ``config.json`` as of a Qwen3 model with a few layers.

The weights are ``fc``, ``hidden_norm``, ``layers`` and ``norm``; embeddings and output matrix are
the target's. ``block_size`` counts the root; ``dflash_config`` says which token stands for a mask
and behind which of the target's layers, numbered from 0, the states are taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from outpace.heads.base import Head, TargetShape, config_of
from outpace.heads.blocks.dflash import DFlash, DFlashConfig, spread
from outpace.heads.folder import Folder
from outpace.heads.formats.base import Content, Format, architectures
from outpace.heads.formats.llama import (
    about_layers,
    check_only,
    knows_all,
    layer_sizes,
    renamed,
    without_derived,
)

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
    given = {
        **layer_sizes(about),
        "depths": block - 1,
        "layers": layers,
        "reads": list(spread(target_layers, layers) if reads is None else (at + 1 for at in reads)),
        "own_mask": False,
        "mask_token": inside["mask_token_id"],
    }
    found = config_of(DFlashConfig, given)
    assert isinstance(found, DFlashConfig)
    return found


def _about(head: DFlash) -> dict[str, Any]:
    config, layer = head.config.as_dict(), head.first_layer
    count, target = config["layers"], head.target
    # The last states are those behind the last layer; a file counts layers from 0.
    behind = [(target.layers if at == -1 else at) - 1 for at in head.layers]
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        **about_layers(head, layer.self_attn, layer.mlp.up_proj.out_features, count),
        "attention_bias": False,
        "use_sliding_window": False,
        "layer_types": ["full_attention"] * count,
        "block_size": config["depths"] + 1,
        "num_target_layers": target.layers,
        ABOUT: {"mask_token_id": config["mask_token"], "target_layer_ids": behind},
    }
