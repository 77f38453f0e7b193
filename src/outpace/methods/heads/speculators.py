"""The folders of vLLM's `speculators` library, for heads of EAGLE and EAGLE-3.

``speculators_model_type`` says what kind of head it is, ``transformer_layer_config`` what its layer
is, as far as that differs from the defaults of its model type, and ``speculators_config`` which
model it was trained for and how many tokens it drafts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from outpace.heads.base import Head
from outpace.heads.checkpoint import Content, Format
from outpace.heads.folder import Folder
from outpace.methods.heads.eagle import Eagle, eagle_head
from outpace.methods.heads.eagle3 import LAYERS, Eagle3, about_eagle3, eagle3_head, eagle3_weights
from outpace.methods.heads.published import (
    about_layers,
    check_only,
    knows_all,
    renamed,
    without_derived,
)

TYPE, LAYER, ABOUT = "speculators_model_type", "transformer_layer_config", "speculators_config"
VERSION = "0.3.0"
"""The version of the library that writes such files."""

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
              "vocab_size": 32000, "rms_norm_eps": 1e-6},
    "qwen3": {"hidden_size": 4096, "intermediate_size": 22016, "num_attention_heads": 32,
              "num_key_value_heads": 32, "head_dim": 128, "vocab_size": 151936,
              "rms_norm_eps": 1e-6},
}  # fmt: skip
"""What transformers takes where a layer's configuration says nothing."""

OWN = {
    "eagle": {"fusion_fc.": "fc.", "transformer.": "layer."},
    "eagle3": {"layers.0.": "midlayer."},
}
ABOVE = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output",
         "target_hidden_size", LAYERS)  # fmt: skip
"""Entries of an EAGLE-3 head's configuration that stand next to its layer's."""


class SpeculatorsFormat(Format):
    """The target is known by its name, its width and its vocabulary."""

    name: ClassVar[str] = "speculators"

    @classmethod
    def recognises(cls, about: Mapping[str, Any]) -> bool:
        return TYPE in about

    @classmethod
    def kind_of(cls, about: Mapping[str, Any]) -> str | None:
        kind = about[TYPE]
        return kind if isinstance(kind, str) and kind in OWN else None

    @classmethod
    def read(cls, folder: Folder, about: Mapping[str, Any]) -> Head:
        kind = about[TYPE]
        if not isinstance(kind, str) or kind not in OWN:
            raise folder.unfit(
                "speculators", f"its kind is {kind!r}, and only {list(OWN)} are known"
            )
        found = renamed(without_derived(folder.read_weights("model.safetensors")), OWN[kind])
        with folder.describing(kind):
            head = _eagle3(about, found) if kind == "eagle3" else _eagle(about, found)
            inside = about[ABOUT]
            name = str(inside["verifier"].get("name_or_path") or "")
            depths = inside["proposal_methods"][0].get("speculative_tokens", head.config.depths)
            if not isinstance(depths, int) or depths < 1:
                raise ValueError(f"its speculative_tokens are {depths!r}")
        head.target, head.config = (
            replace(head.target, name=name),
            replace(head.config, depths=depths),
        )
        if kind == "eagle":
            found["d2t"] = head.d2t  # it knows all tokens
        return folder.fill(head, found)

    @classmethod
    def write(cls, head: Head) -> Content:
        if isinstance(head, Eagle3):
            return Content(_about_eagle3(head), renamed(eagle3_weights(head), _public("eagle3")))
        if not isinstance(head, Eagle):
            raise cls.refuse(f"holds no {head.kind} heads")
        if head.lm_head is not None or not knows_all(head):
            raise cls.refuse("holds EAGLE heads that know all tokens only")
        if head.layer.input_layernorm is not None or head.embed_tokens is not None:
            raise cls.refuse("holds EAGLE heads without norms before and embeddings of their own")
        weights = renamed(head.state_dict(), _public("eagle"))
        del weights["d2t"]
        return Content(_about_eagle(head), weights)


def _public(kind: str) -> dict[str, str]:
    return {own: public for public, own in OWN[kind].items()}


def _layer(about: Mapping[str, Any]) -> dict[str, Any]:
    """The layer's whole configuration."""
    layer = about[LAYER]
    kind = layer.get("model_type", "llama")
    if kind not in DEFAULTS:
        raise ValueError(f"its layer is of the type {kind!r}, and only {list(DEFAULTS)} are known")
    return {**DEFAULTS[kind], **layer, "num_hidden_layers": layer.get("num_hidden_layers", 1)}


def _eagle3(about: Mapping[str, Any], weights: dict[str, Tensor]) -> Eagle3:
    above = {name: about[name] for name in ABOVE if about.get(name) is not None}
    return eagle3_head({**_layer(about), **above}, weights)


def _eagle(about: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Eagle:
    check_only(about, {"layernorms": False})
    return eagle_head(_layer(about), weights)


def _about_eagle3(head: Eagle3) -> dict[str, Any]:
    flat = about_eagle3(head)
    kind = "llama" if head.midlayer.self_attn.q_norm is None else "qwen3"
    above = {name: flat.pop(name) for name in ABOVE if name in flat}
    return _about(head, flat, kind, {"architectures": ["Eagle3Speculator"], **above})


def _about_eagle(head: Eagle) -> dict[str, Any]:
    layer = head.layer
    flat = about_layers(head, layer.self_attn, layer.mlp.up_proj.out_features)
    flat["attention_bias"] = layer.self_attn.q_proj.bias is not None
    above = {
        "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "layernorms": False,
        "fusion_bias": head.fc.bias is not None,
    }
    return _about(head, flat, "llama", above)


def _about(
    head: Head, layer: Mapping[str, Any], kind: str, above: Mapping[str, Any]
) -> dict[str, Any]:
    proposal = {"proposal_type": "greedy", "speculative_tokens": head.config.depths}
    return {
        **above,
        TYPE: head.kind,
        "speculators_version": VERSION,
        ABOUT: {
            "algorithm": head.kind,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": head.target.name, "architectures": []},
        },
        LAYER: {"model_type": kind, **layer},
    }
