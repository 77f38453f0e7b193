"""The folders of vLLM's `speculators` library, for heads of EAGLE, EAGLE-3, P-EAGLE, DFlash,
DFlash 2 and DSpark. Multi-token-prediction modules in such folders are read with their target
(`targets.hf.loading.nextn`).

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
from outpace.heads.checkpoint import Format, HeadCheckpoint
from outpace.heads.folder import WEIGHTS, HeadFolder
from outpace.methods.heads.dflash import DFlash
from outpace.methods.heads.dflash2 import ENTRIES as SELECTOR
from outpace.methods.heads.dflash2 import DFlash2, dflash2_head
from outpace.methods.heads.dflash_format import ABOUT as DFLASH
from outpace.methods.heads.dflash_format import block_weights, dflash_config_dict, dflash_weights
from outpace.methods.heads.dspark import DSpark
from outpace.methods.heads.dspark_format import ENTRIES, dspark_config_dict, dspark_head
from outpace.methods.heads.eagle import Eagle, eagle_head
from outpace.methods.heads.eagle3 import Eagle3
from outpace.methods.heads.eagle3_format import (
    MASKS,
    NORMS,
    STATES,
    eagle3_config_dict,
    eagle3_head,
    eagle3_names,
    eagle3_weights,
)
from outpace.methods.heads.markov import GRU
from outpace.methods.heads.published import (
    LAYERS,
    check_supported,
    drop_inv_freq,
    has_full_vocab,
    layer_config_dict,
    rename_prefixes,
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

KINDS: Mapping[str, str] = {"eagle": "eagle", "eagle3": "eagle3", "peagle": "eagle3",
                            "dflash": "dflash", "dspark": "dspark", "dflash2": "dflash2",
                            "mtp": "mtp"}  # fmt: skip
"""The kinds of heads there, and ours."""
EAGLE = {"fusion_fc.": "fc.", "transformer.": "layer."}
PUBLIC: Mapping[str, Mapping[str, str]] = {
    "eagle": {own: public for public, own in EAGLE.items()},
    "eagle3": {"midlayer.": "layers.0.", "stack.": "layers."},
}
"""Beginnings of our names of weights, and theirs."""
ABOVE = ("draft_vocab_size", "target_hidden_size", LAYERS, *NORMS, MASKS[0])
"""Entries of an EAGLE-3 head's configuration that stand next to its layer's."""
OF_DFLASH2 = SELECTOR
"""Those of DFlash 2's."""
BLOCK = ("block_size", "sample_from_anchor", "sliding_window_non_causal", "target_hidden_size",
         MASKS[0], "draft_vocab_size", "input_embedding_scale", "output_multiplier")  # fmt: skip
"""Those of a DFlash head's; one of DSpark has `ENTRIES`, too."""
AUX = "aux_hidden_state_layer_ids"
"""The numbers of the hidden states that it reads."""


class SpeculatorsFormat(Format):
    """The target is known by its name, its width and its vocabulary."""

    name: ClassVar[str] = "speculators"

    @classmethod
    def recognises(cls, about: Mapping[str, Any]) -> bool:
        return TYPE in about

    @classmethod
    def kind_of(cls, about: Mapping[str, Any]) -> str | None:
        kind = about[TYPE]
        return KINDS.get(kind) if isinstance(kind, str) else None

    @classmethod
    def read(cls, folder: HeadFolder, about: Mapping[str, Any]) -> Head:
        kind = cls.kind_of(about)
        if kind is None:
            raise folder.unfit(
                "speculators", f"its kind is {about[TYPE]!r}, and only {list(KINDS)} are known"
            )
        if kind == "mtp":
            raise folder.unfit(
                kind,
                "it holds a layer of its target's kind, which --method mtp reads with the target",
            )
        blocks = ("dflash", "dspark", "dflash2")
        found = block_weights(folder) if kind in blocks else folder.read_weights(WEIGHTS)
        read = {"eagle": _eagle, "eagle3": _eagle3, **dict.fromkeys(blocks, _dflash)}[kind]
        with folder.describing(kind):
            head, found = read(about, found)
            inside = about[ABOUT]
            name = str(inside["verifier"].get("name_or_path") or "")
            depths = inside["proposal_methods"][0].get("speculative_tokens", head.config.depths)
            if not isinstance(depths, int) or depths < 1:
                raise ValueError(f"its speculative_tokens are {depths!r}")
            head.target = replace(head.target, name=name)
            if read is not _dflash:  # whose block is as long as it was trained for
                head.config = replace(head.config, depths=depths)
        return folder.fill(head, found)

    @classmethod
    def write(cls, head: Head) -> HeadCheckpoint:
        if isinstance(head, Eagle3) and head.config.latent:
            raise cls.refuse("holds no heads with latent attention")
        if isinstance(head, Eagle3):
            return HeadCheckpoint(
                _about_eagle3(head), rename_prefixes(eagle3_weights(head), PUBLIC["eagle3"])
            )
        if getattr(head.config, "markov_head_type", None) == GRU:
            raise cls.refuse("holds no Domino heads")
        if isinstance(head, DFlash) and not isinstance(head, DFlash2):
            return HeadCheckpoint(_about_dflash(head), dflash_weights(head))
        if not isinstance(head, Eagle):
            raise cls.refuse(f"holds no {head.kind} heads")
        if head.lm_head is not None or not has_full_vocab(head):
            raise cls.refuse("holds EAGLE heads that know all tokens only")
        if head.layer.input_layernorm is not None or head.embed_tokens is not None:
            raise cls.refuse("holds EAGLE heads without norms before and embeddings of their own")
        weights = rename_prefixes(head.state_dict(), PUBLIC["eagle"])
        del weights["d2t"]
        return HeadCheckpoint(_about_eagle(head), weights)


def _layer(about: Mapping[str, Any]) -> dict[str, Any]:
    """The layer's whole configuration."""
    layer = about[LAYER]
    kind = layer.get("model_type", "llama")
    if kind not in DEFAULTS:
        raise ValueError(f"its layer is of the type {kind!r}, and only {list(DEFAULTS)} are known")
    return {**DEFAULTS[kind], **layer, "num_hidden_layers": layer.get("num_hidden_layers", 1)}


def _eagle3(
    about: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> tuple[Head, dict[str, Tensor]]:
    """A head, and its weights by our names."""
    above = {name: about[name] for name in ABOVE if about.get(name) is not None}
    found = eagle3_names(weights)
    return eagle3_head({**_layer(about), **above, STATES: True}, found), found


def _eagle(
    about: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> tuple[Head, dict[str, Tensor]]:
    """The same."""
    check_supported(about, {"layernorms": False})
    found = rename_prefixes(drop_inv_freq(weights), EAGLE)
    head = eagle_head(_layer(about), found)
    return head, {**found, "d2t": head.d2t}  # it knows all tokens


def _dflash(
    about: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> tuple[Head, dict[str, Tensor]]:
    """The same."""
    names = (*BLOCK, *ENTRIES)
    above = {name: about[name] for name in names if about.get(name) is not None}
    inside = {"target_layer_ids": [at - 1 for at in about[AUX]]}
    whole = {"sliding_window_non_causal": True}  # of files that are older than the entry
    anchor = {"sample_from_anchor": _guesses_at_root(about)}
    flat = {**_layer(about), **whole, **anchor, **above, DFLASH: inside}
    if about[TYPE] == "dflash2":
        return dflash2_head(
            {**flat, **{name: about[name] for name in OF_DFLASH2 if name in about}}, weights
        )
    return dspark_head(flat, weights)


def _guesses_at_root(about: Mapping[str, Any]) -> bool:
    """Whether the root's place of a DSpark head guesses, too, where its file does not say so. Heads
    of `speculators` before July 2026 do not, unless they propose as many tokens as a block has
    places."""
    proposed = about[ABOUT]["proposal_methods"][0].get("speculative_tokens")
    return bool(about[TYPE] == "dspark" and proposed == about.get("block_size"))


def _about_eagle3(head: Eagle3) -> dict[str, Any]:
    flat = eagle3_config_dict(head)
    layer = "qwen3" if head.config.normed else "llama"
    above = {name: flat.pop(name) for name in ABOVE if name in flat}
    for name in (STATES, MASKS[1], "num_depths"):
        flat.pop(name, None)
    kind = "peagle" if head.config.parallel else "eagle3"
    name = "PEagleSpeculator" if head.config.parallel else "Eagle3Speculator"
    return _about(head, flat, layer, {"architectures": [name], **above}, kind)


def _about_dflash(head: DFlash) -> dict[str, Any]:
    joined = isinstance(head, DSpark)
    form = SpeculatorsFormat
    flat = (
        dspark_config_dict(head, form)
        if isinstance(head, DSpark)
        else dflash_config_dict(head, form)
    )
    windows, causal = head.config.windows, head.config.causal
    if causal and causal != [bool(window) for window in windows]:
        raise SpeculatorsFormat.refuse("has causal blocks in layers with windows only")
    if head.config.input_embedding_scale != 1.0:
        raise SpeculatorsFormat.refuse("has no word for input_embedding_scale")
    inside = flat.pop(DFLASH)
    above = {name: flat.pop(name) for name in (*BLOCK, *ENTRIES) if name in flat}
    above |= {
        "architectures": ["DSparkSpeculator" if joined else "DFlashSpeculator"],
        "draft_vocab_size": head.vocabulary,
        MASKS[0]: inside["mask_token_id"],
        AUX: [at + 1 for at in inside["target_layer_ids"]],
        "sample_from_anchor": head.config.sample_from_anchor,
        "sliding_window_non_causal": bool(windows) and not causal,
    }
    return _about(head, flat, "qwen3", above, head.kind)


def _about_eagle(head: Eagle) -> dict[str, Any]:
    layer = head.layer
    flat = layer_config_dict(head, layer.self_attn, layer.mlp.up_proj.out_features)
    flat["attention_bias"] = layer.self_attn.q_proj.bias is not None
    above = {
        "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "layernorms": False,
        "fusion_bias": head.fc.bias is not None,
    }
    return _about(head, flat, "llama", above, "eagle")


def _about(
    head: Head, layer: Mapping[str, Any], layer_kind: str, above: Mapping[str, Any], kind: str
) -> dict[str, Any]:
    proposal = {"proposal_type": "greedy", "speculative_tokens": head.config.depths}
    return {
        **above,
        TYPE: kind,
        "speculators_version": VERSION,
        ABOUT: {
            "algorithm": kind,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": head.target.name, "architectures": []},
        },
        LAYER: {"model_type": layer_kind, **layer},
    }
