"""DFlash's published format: ``config.json`` as of a Qwen3 model with a few layers.

The weights are ``fc``, ``hidden_norm``, ``layers`` and ``norm``; embeddings and output matrix are
mostly the target's. ``block_size`` counts the root; ``dflash_config``, or entries in its place,
says which token stands for a mask and after which of the target's layers, numbered from 0, the
states are taken. A head that knows some tokens only brings ``lm_head`` and ``d2t``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

from torch import Tensor

from outpace.heads.base import Head, TargetShape, parse_config
from outpace.heads.checkpoint import Format, HeadCheckpoint, architectures
from outpace.heads.folder import HeadFolder
from outpace.methods.heads.dflash import QWEN3, DFlash, DFlashConfig, build_target_layer_ids
from outpace.methods.heads.published import (
    FULL,
    SLIDING,
    check_supported,
    d2t_from_offsets,
    drop_inv_freq,
    has_full_vocab,
    layer_config_dict,
    layer_sizes,
    published_weights,
    rename_prefixes,
    windows,
)

ARCHITECTURE, ABOUT = "DFlashDraftModel", "dflash_config"
OWN, PUBLIC = {"layers.": "stack."}, {"stack.": "layers."}
SUPPORTED_VALUES: Mapping[str, Any] = {
    "add_swa_attention_sink_bias": False,
    "attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "is_neox_style": True,
    "logit_scale": 1.0,
    "output_multiplier": 1.0,
    "projector_type": None,
    "pure_draft_prefix_len": 0,
}
"""Entries by which a head that is built otherwise, and cannot be read, is recognised: among
them Domino's."""
ANCHOR = ("sample_from_anchor", "shift_label", "query_zero_predicts_next")
"""Entries that say that the root's place guesses, too."""
NO_ANCHOR = "dspark_bonus_anchor"
"""One that says that it does not (vLLM)."""
MASK_FILE, MASK_NAMES = "mask_embedding.pt", ("embedding", "mask_embedding")
"""The file of a mask that is no token of the target, and what it is called there."""


class DFlashFormat(Format):
    """The target is known by its width, its vocabulary and its number of layers."""

    name: ClassVar[str] = "dflash"

    @classmethod
    def recognises(cls, about: Mapping[str, Any]) -> bool:
        return ARCHITECTURE in architectures(about) or ABOUT in about

    @classmethod
    def read(cls, folder: HeadFolder, about: Mapping[str, Any]) -> Head:
        weights = block_weights(folder)
        with folder.describing("dflash"):
            if (found := architectures(about)) and ARCHITECTURE not in found:
                raise ValueError(f"its architecture is {sorted(found)}, and only DFlash is known")
            head, weights = dflash_head(about, weights)
        return folder.fill(head, weights)

    @classmethod
    def write(cls, head: Head) -> HeadCheckpoint:
        if type(head) is not DFlash:
            raise cls.refuse(f"holds no {head.kind} heads")
        return HeadCheckpoint(dflash_config_dict(head, cls), dflash_weights(head))


def block_weights(folder: HeadFolder) -> dict[str, Tensor]:
    """Returns the weights of a folder, and as ``mask`` what it has in `MASK_FILE`."""
    weights = folder.read_weights("model.safetensors")
    if (folder.path / MASK_FILE).is_file():
        mask = folder.read_tensor(MASK_FILE, MASK_NAMES).flatten()
        weights["mask"] = mask.to(weights["fc.weight"].dtype) if "fc.weight" in weights else mask
    return weights


def guesses_at_root(entries: Mapping[str, Any]) -> bool | None:
    """Returns whether the root's place guesses, too; None where no entry says it."""
    said = [bool(entries[name]) for name in ANCHOR if entries.get(name) is not None]
    if not said and entries.get(NO_ANCHOR) is not None:
        said = [not entries[NO_ANCHOR]]
    return any(said) if said else None


def flatten_config(about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of a configuration, with those about DFlash among the others."""
    inside = about.get(ABOUT)
    return {**about, **inside} if isinstance(inside, dict) else dict(about)


def dflash_head(
    about: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    kind: type[DFlash] = DFlash,
    more: Mapping[str, Any] | None = None,
) -> tuple[DFlash, dict[str, Tensor]]:
    """Returns a head, still without its weights, from its public configuration, and these by our
    names. Raises one of `heads.folder.CONFIG_ERRORS` where they do not fit.

    kind: which has more parts, maybe, the sizes of which are ``more``.
    """
    entries = flatten_config(about)
    check_supported(entries, SUPPORTED_VALUES)
    found = rename_prefixes(drop_inv_freq(weights), OWN)
    size, layers = about["hidden_size"], about.get("num_target_layers") or 0
    if about.get("target_hidden_size") not in (None, size):
        raise ValueError("its width is not its target's")
    target = TargetShape(size, about["vocab_size"], layers)
    given = {**_config(about, entries, layers, found), **(more or {})}
    head = kind(target, cast(DFlashConfig, parse_config(kind.Config, given)))
    d2t = d2t_from_offsets(found, head)
    return head, {**found, "d2t": d2t}


def _config(
    about: Mapping[str, Any],
    entries: Mapping[str, Any],
    target_layers: int,
    weights: Mapping[str, Tensor],
) -> dict[str, Any]:
    layers = about["num_hidden_layers"]
    block, reads = entries.get("block_size"), entries.get("target_layer_ids")
    known = "mask" in weights or isinstance(entries.get("mask_token_id"), int)
    if not isinstance(block, int) or not known:
        raise ValueError("it says no block_size or no mask_token_id")
    if reads is None and not target_layers:
        raise ValueError("it says neither target_layer_ids nor num_target_layers")
    own = (
        build_target_layer_ids(target_layers, layers) if reads is None else [at + 1 for at in reads]
    )
    limited = _windows(about, entries, layers)
    anchor = bool(guesses_at_root(entries))
    own_mask = "mask" in weights
    return {
        **layer_sizes(about),
        "depths": block - (not anchor),
        "sample_from_anchor": anchor,
        "layers": layers,
        "reads": [*own],
        "own_mask": own_mask,
        "mask_token": 0 if own_mask else entries["mask_token_id"],
        "draft_vocab_size": len(weights["lm_head.weight"]) if "lm_head.weight" in weights else 0,
        "own_embedding": "embed_tokens.weight" in weights,
        "bias": "stack.0.self_attn.q_proj.bias" in weights,
        "input_embedding_scale": entries.get("input_embedding_scale") or 1.0,
        "windows": limited,
        "causal": _causal(entries, limited if _slides_by_type(about, layers) else []),
    }


def _windows(about: Mapping[str, Any], entries: Mapping[str, Any], layers: int) -> list[int]:
    """How far each layer sees; nothing where all see all."""
    window, all_slide = entries.get("swa_window_size") or about.get("sliding_window"), False
    if entries.get("use_swa"):
        about, all_slide = {**about, "use_sliding_window": True}, not _slides_by_type(about, layers)
    if not all_slide:
        if about.get("use_sliding_window") and not about.get("layer_types"):
            raise ValueError("its use_sliding_window is true, and it has no layer_types")
        return windows({**about, "sliding_window": window}, layers)
    if type(window) is not int or window < 1:
        raise ValueError(f"its swa_window_size is {window!r}")
    return [window] * layers


def _slides_by_type(about: Mapping[str, Any], layers: int) -> bool:
    """Whether it is the types of its layers that say which ones have windows: they come before
    ``use_swa``, which gives all of them one (vLLM)."""
    kinds = about.get("layer_types") or []
    return len(kinds) == layers and SLIDING in kinds


CAUSAL = ("is_causal", "causal")
"""Entries that say of all layers whether a token of a block sees only those before it."""


def _causal(entries: Mapping[str, Any], limited: list[int]) -> list[bool]:
    """Whether each layer's tokens see only those of their block that come before them; nothing
    where all see the whole block. Where no entry says it, layers with a window by their type,
    ``limited``, are causal (vLLM)."""
    if entries.get("sliding_window_non_causal"):
        return []
    said = [entries[name] for name in CAUSAL if entries.get(name) is not None]
    if said:
        return [True] * entries["num_hidden_layers"] if said[0] else []
    return [bool(window) for window in limited]


def dflash_weights(head: DFlash) -> dict[str, Tensor]:
    """Returns a head's weights by their public names."""
    maps = {"d2t", "t2d"} if has_full_vocab(head) else set()
    weights = rename_prefixes(published_weights(head), PUBLIC)
    return {name: value for name, value in weights.items() if name not in maps}


def dflash_config_dict(head: DFlash, form: type[Format]) -> dict[str, Any]:
    """Returns the public configuration of a head. form: which refuses what it has no words for."""
    if head.mask is not None:
        raise form.refuse(
            "holds heads whose masks are a token of the target only (--set own_mask=false and "
            "--set mask_token=N when it is trained)"
        )
    config, layer, target = head.config, head.first_layer, head.target
    if config.family != QWEN3:
        raise form.refuse("holds heads with layers of Qwen3's kind only")
    if -1 in head.hidden_layers:
        raise form.refuse("has no words for states that went through the target's last norm")
    taken = [at - 1 for at in head.hidden_layers]  # a file counts layers from 0
    inside: dict[str, Any] = {"mask_token_id": config.mask_token, "target_layer_ids": taken}
    if config.input_embedding_scale != 1.0:
        inside["input_embedding_scale"] = config.input_embedding_scale
    usual = [bool(window) for window in config.windows]
    if config.causal != usual:
        if len(set(config.causal)) > 1:
            raise form.refuse("has no words for layers some of which are causal")
        inside["causal"] = any(config.causal)
    about = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        **layer_config_dict(head, layer.self_attn, layer.mlp.up_proj.out_features, config.layers),
        "attention_bias": config.bias,
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
