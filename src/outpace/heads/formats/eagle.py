"""EAGLE's published heads, of its first and second edition: ``config.json`` of a Llama with one
layer, or of a Qwen2.

The weights are ``fc`` and ``layers.0``, whose attention reads its input as it is, and mostly a copy
of the target's ``embed_tokens``. Nothing in the configuration says that it is a head; from a whole
model of one layer it is told by its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from outpace.heads.attending.eagle import Eagle, EagleConfig
from outpace.heads.base import Head, TargetShape, config_of
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

ARCHITECTURES = ("LlamaForCausalLMEagle", "LlamaForCausalLM", "Qwen2ForCausalLM")
OWN = {"layers.0.": "layer."}
PUBLIC = {"layer.": "layers.0."}
ONLY: Mapping[str, Any] = {"num_hidden_layers": 1, "tie_word_embeddings": False}


class EagleFormat(Format):
    """The target is known by its width and its vocabulary only."""

    name: ClassVar[str] = "eagle"

    @classmethod
    def recognises(cls, about: Mapping[str, Any]) -> bool:
        known = architectures(about).intersection(ARCHITECTURES)
        return bool(known) and about.get("num_hidden_layers") == 1

    @classmethod
    def kind_of(cls, about: Mapping[str, Any]) -> str | None:
        return None  # a language model of one layer has the same configuration

    @classmethod
    def read(cls, folder: Folder, about: Mapping[str, Any]) -> Head:
        found = folder.read_weights("model.safetensors", "pytorch_model.bin")
        weights = renamed(without_derived(found), OWN)
        with folder.describing("eagle"):
            check_only(about, ONLY)
            head = eagle_head(about, weights)
        return folder.fill(head, {**weights, "d2t": head.d2t})

    @classmethod
    def write(cls, head: Head) -> Content:
        if not isinstance(head, Eagle):
            raise cls.refuse(f"holds no {head.kind} heads")
        if not knows_all(head):
            raise cls.refuse("holds heads that know all tokens only")
        weights = renamed(head.state_dict(), PUBLIC)
        del weights["d2t"]
        attention, inner = head.layer.self_attn, head.layer.mlp.up_proj.out_features
        about = {
            "architectures": [ARCHITECTURES[0]],
            "model_type": "llama",
            **about_layers(head, attention, inner),
            "bias": head.fc.bias is not None,
            "qkv_bias": attention.q_proj.bias is not None,
        }
        return Content(about, weights)


def eagle_head(about: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Eagle:
    """Returns a head, still without its weights, from its layer's public configuration. Which parts
    it has follows from the weights, by our own names. Raises one of `heads.folder.UNFIT` where they
    do not fit."""
    given = {
        **layer_sizes(about),
        "fusion_bias": "fc.bias" in weights,
        "bias": "layer.self_attn.q_proj.bias" in weights,
        "input_norm": "layer.input_layernorm.weight" in weights,
        "own_embedding": "embed_tokens.weight" in weights,
        "draft_vocab_size": about["vocab_size"] if "lm_head.weight" in weights else 0,
    }
    config = config_of(EagleConfig, given)
    assert isinstance(config, EagleConfig)
    return Eagle(TargetShape(about["hidden_size"], about["vocab_size"], 0), config)
