"""EAGLE-3's published heads: ``config.json`` as of a Llama model with one layer.

The weights are ``fc``, ``midlayer``, ``norm`` and ``lm_head``. A head that knows some of the
target's tokens only brings ``d2t``, which is what to add to the number of each of its own tokens to
get the target's, and ``t2d``, which says of each of the target's tokens whether it is one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from outpace.heads.attending.eagle3 import Eagle3, Eagle3Config
from outpace.heads.base import Head, TargetShape, config_of
from outpace.heads.folder import Folder
from outpace.heads.formats.base import Content, Format, architectures
from outpace.heads.formats.llama import about_layers, check_only, layer_sizes, without_derived

ARCHITECTURE = "LlamaForCausalLMEagle3"
LAYERS = "eagle_aux_hidden_state_layer_ids"

ONLY: Mapping[str, Any] = {
    "num_hidden_layers": 1,
    "attention_bias": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
}
"""Entries by which a head that is built otherwise, and cannot be read, is told."""


class Eagle3Format(Format):
    """The target is known by its width and its vocabulary only."""

    name: ClassVar[str] = "eagle3"

    @classmethod
    def recognises(cls, about: Mapping[str, Any]) -> bool:
        return ARCHITECTURE in architectures(about)

    @classmethod
    def read(cls, folder: Folder, about: Mapping[str, Any]) -> Head:
        weights = without_derived(folder.read_weights("model.safetensors", "pytorch_model.bin"))
        with folder.describing("eagle3"):
            head = eagle3_head(about, weights)
        return folder.fill(head, weights)

    @classmethod
    def write(cls, head: Head) -> Content:
        if not isinstance(head, Eagle3):
            raise cls.refuse(f"holds no {head.kind} heads")
        about = {"architectures": [ARCHITECTURE], "model_type": "llama", **about_eagle3(head)}
        return Content(about, eagle3_weights(head))


def eagle3_head(about: Mapping[str, Any], weights: dict[str, Tensor]) -> Eagle3:
    """Returns a head, still without its weights, from its public configuration, and gives the
    weights our ``d2t``. Raises one of `heads.folder.UNFIT` where they do not fit."""
    target = TargetShape(about["hidden_size"], about["vocab_size"], 0)
    head = Eagle3(target, _config(about, weights))
    weights["d2t"] = _to_target(weights, head)
    return head


def eagle3_weights(head: Eagle3) -> dict[str, Tensor]:
    """Returns the weights of a head by their public names."""
    weights = dict(head.state_dict())
    d2t = weights.pop("d2t")
    if head.config.draft_vocab_size:
        weights["d2t"] = d2t - torch.arange(len(d2t), device=d2t.device)
        weights["t2d"] = _known(d2t, head.target.vocab_size)
    return weights


def _config(about: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Eagle3Config:
    check_only(about, ONLY)
    if about.get("target_hidden_size") not in (None, about["hidden_size"]):
        raise ValueError("its width is not its target's")
    given = {
        **layer_sizes(about),
        "depths": Eagle3Config().depths,
        "draft_vocab_size": about.get("draft_vocab_size") or 0 if "d2t" in weights else 0,
        "reads": list(about.get(LAYERS) or ()),
        "own_embedding": "embed_tokens.weight" in weights,
        "normed": "midlayer.self_attn.q_norm.weight" in weights,
        "norm_before_residual": about.get("norm_before_residual", False),
    }
    found = config_of(Eagle3Config, given)
    assert isinstance(found, Eagle3Config)
    return found


def _to_target(weights: dict[str, Tensor], head: Eagle3) -> Tensor:
    """The target's tokens for the head's own, from their distances."""
    offsets, mask = weights.pop("d2t", None), weights.pop("t2d", None)
    if offsets is None:
        return head.d2t
    if offsets.shape != head.d2t.shape:
        raise ValueError(f"d2t has {len(offsets)} entries, not {len(head.d2t)}")
    d2t = offsets.long() + torch.arange(len(offsets))
    size = head.target.vocab_size
    if int(d2t.min()) < 0 or int(d2t.max()) >= size or len(set(d2t.tolist())) != len(d2t):
        raise ValueError(f"d2t does not lead to {len(d2t)} of the {size} tokens")
    if mask is not None and not torch.equal(mask.bool(), _known(d2t, size)):
        raise ValueError("d2t and t2d disagree")
    return d2t


def _known(d2t: Tensor, size: int) -> Tensor:
    found = torch.zeros(size, dtype=torch.bool, device=d2t.device)
    found[d2t] = True
    return found


def about_eagle3(head: Eagle3) -> dict[str, Any]:
    """Returns the public configuration of a head."""
    attention, inner = head.midlayer.self_attn, head.midlayer.mlp.up_proj.out_features
    about = {
        "attention_bias": False,
        "mlp_bias": False,
        "norm_before_residual": head.config.as_dict()["norm_before_residual"],
        "draft_vocab_size": head.vocabulary,
        **about_layers(head, attention, inner),
    }
    if head.target.layers or head.config.as_dict()["reads"]:
        about[LAYERS] = list(head.layers)
    return about
