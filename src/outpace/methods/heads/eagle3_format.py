"""EAGLE-3's published heads: ``config.json`` as of a Llama model with one layer, or a few.

The weights are ``fc``, the first layer, maybe further ones, ``norm`` and ``lm_head``, under
several names (`NAMES`). A head that knows some of the target's tokens only brings ``d2t``, which
is what to add to the number of each of its own tokens to get the target's, and ``t2d``, which
says of each of the target's tokens whether it is one of them. What the weights show is not asked
of the configuration, which is often a copy of the target's with some entries changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from outpace.heads.base import Head, TargetShape, parse_config
from outpace.heads.checkpoint import Format, HeadCheckpoint, architectures
from outpace.heads.folder import HeadFolder
from outpace.methods.heads.eagle3 import Eagle3, Eagle3Config
from outpace.methods.heads.published import (
    LAYERS,
    SLIDING,
    check_supported,
    d2t_from_offsets,
    drop_inv_freq,
    layer_config_dict,
    layer_sizes,
    published_weights,
    rename_prefixes,
    windows,
)

DEEPSPEC = "Qwen3Eagle3Model"
LLAMA, LATENT_MODEL = "LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"
ARCHITECTURES = (
    LLAMA,  # SafeAILab, SGLang, SpecForge, TensorRT-LLM, ModelOpt
    "Eagle3LlamaForCausalLM",  # vLLM, llama.cpp
    "LlamaEagle3DraftModel",  # NeMo Automodel
    "PEagleDraftModel",  # SpecForge
    "PeagleLlamaForCausalLM",  # vLLM
    LATENT_MODEL,  # TorchSpec, vLLM, SGLang: with DeepSeek's latent attention
    "Eagle3DeepseekV3ForCausalLM",
    "LlamaForCausalLMEagle4",  # NeMo Automodel
    DEEPSPEC,
)
NESTED = "eagle_config"
"""An entry with further ones, which come before those that stand next to it."""
STATES = "outpace_counts_states"
"""Whether `LAYERS` are numbers of hidden states even if the first one is 1: an entry of ours."""
MASKS = ("mask_token_id", "pard_token", "ptd_token_id")
"""What the token of a mask is called."""
DEPTHS = 8
"""What P-EAGLE's code trains for where nothing is said."""

NAMES: Sequence[Mapping[str, str]] = (
    {"model.": ""},
    {"layers.0.": "midlayer.", "layers.": "stack."},
)
"""Other beginnings of weights' names, and ours. They are replaced one table after the other."""
PUBLIC: Mapping[str, str] = {"stack.": "layers."}

LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""The sizes of latent attention, which is known by the weight of its keys and values."""
OF_LATENT = "midlayer.self_attn.kv_a_proj_with_mqa.weight"

CANDIDATES = "efficient_lm_head"
"""How the weights of EAGLE-4's candidate head begin. It finds the tokens whose logits are worth
making, and does not change them: here the whole output matrix makes all."""

SUPPORTED_VALUES: Mapping[str, Any] = {
    "logit_scale": 1.0,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}
"""Entries by which a head that is built otherwise, and cannot be read, is recognised."""


class Eagle3Format(Format):
    """The target is known by its width and its vocabulary only."""

    name: ClassVar[str] = "eagle3"

    @classmethod
    def recognises(cls, about: Mapping[str, Any]) -> bool:
        names = [name.lower() for name in architectures(about)]
        return any(each in name for name in names for each in ("eagle3", "peagle", "eagle4"))

    @classmethod
    def read(cls, folder: HeadFolder, about: Mapping[str, Any]) -> Head:
        if not architectures(about).intersection(ARCHITECTURES):
            raise folder.unfit(
                "eagle3",
                f"its architecture is {sorted(architectures(about))}, and only "
                f"{list(ARCHITECTURES)} are known",
            )
        weights = eagle3_names(folder.read_weights("model.safetensors", "pytorch_model.bin"))
        with folder.describing("eagle3"):
            head = eagle3_head(about, weights)
        return folder.fill(head, weights)

    @classmethod
    def write(cls, head: Head) -> HeadCheckpoint:
        if not isinstance(head, Eagle3):
            raise cls.refuse(f"holds no {head.kind} heads")
        kind, model = (LATENT_MODEL, "deepseek_v3") if head.config.latent else (LLAMA, "llama")
        about = {"architectures": [kind], "model_type": model, **eagle3_config_dict(head)}
        return HeadCheckpoint(about, rename_prefixes(eagle3_weights(head), PUBLIC))


def eagle3_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights of a published head by our names."""
    found = drop_inv_freq(weights)
    for names in NAMES:
        found = rename_prefixes(found, names)
    return {name: each for name, each in found.items() if not name.startswith(CANDIDATES)}


def eagle3_head(about: Mapping[str, Any], weights: dict[str, Tensor]) -> Eagle3:
    """Returns a head, still without its weights, from its public configuration, and gives the
    weights, which have our names, our ``d2t``. Raises one of `heads.folder.CONFIG_ERRORS` where
    they do not fit."""
    about = {**about, **(about.get(NESTED) or {})}
    if DEEPSPEC in architectures(about):
        about |= {LAYERS: [at + 1 for at in about["target_layer_ids"]], STATES: True}
        about["num_depths"] = about.get("ttt_length")
    size = about.get("target_hidden_size") or about["hidden_size"]
    if about.get("tie_word_embeddings") and "lm_head.weight" not in weights:
        weights["lm_head.weight"] = weights["embed_tokens.weight"].clone()
    if "mask_hidden" in weights:
        weights["mask_hidden"] = weights["mask_hidden"].flatten()
    target = TargetShape(size, about["vocab_size"], 0)
    head = Eagle3(target, _config(about, weights, size))
    weights["d2t"] = d2t_from_offsets(weights, head)
    return head


def eagle3_weights(head: Eagle3) -> dict[str, Tensor]:
    """Returns the weights of a head by their public names, but for those of its layers."""
    weights = published_weights(head)
    if head.mask_hidden is not None:
        weights["mask_hidden"] = weights["mask_hidden"][None, None]
    return weights


def _config(about: Mapping[str, Any], weights: Mapping[str, Tensor], size: int) -> Eagle3Config:
    check_supported(about, SUPPORTED_VALUES)
    fused, parallel = about.get("use_aux_hidden_state", True), "mask_hidden" in weights
    layers, latent = _own_layers(about, weights), {}
    if OF_LATENT in weights:
        latent = {name: about.get(name) for name in LATENT}
        about = {**about, "num_key_value_heads": None, "head_dim": about["qk_rope_head_dim"]}
    if about.get("sliding_window") and about.get("layer_types") is None and _is_eagle4(about):
        about = {**about, "layer_types": [SLIDING] * layers}
    given = {
        **layer_sizes(about),
        "depths": about.get("num_depths") or (DEPTHS if parallel else Eagle3Config().depths),
        "draft_vocab_size": about.get("draft_vocab_size") or 0 if "d2t" in weights else 0,
        "reads": _reads(about, weights, size) if fused else [],
        "layers": layers,
        "hidden_size": about["hidden_size"] if about["hidden_size"] != size else 0,
        "own_embedding": "embed_tokens.weight" in weights,
        "own_head": "lm_head.weight" in weights,
        "normed": "midlayer.self_attn.q_norm.weight" in weights,
        "bias": "midlayer.self_attn.q_proj.bias" in weights,
        "output_bias": "midlayer.self_attn.o_proj.bias" in weights,
        "windows": windows(about, layers),
        "latent": latent,
        "fused": fused,
        "fusion_bias": "fc.bias" in weights,
        "parallel": parallel,
        "mask_token": _mask(about) if parallel else 0,
        **{name: about.get(name) or False for name in NORMS},
    }
    return parse_config(Eagle3Config, given)


def _is_eagle4(about: Mapping[str, Any]) -> bool:
    """Whether a window is that of all layers, and no entry that is copied from the target."""
    return any("eagle4" in name.lower() for name in architectures(about))


NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Entries about norms, which are called as ours and false where nothing is said."""


def _own_layers(about: Mapping[str, Any], weights: Mapping[str, Tensor]) -> int:
    """How many layers there are weights of. A configuration may have the target's number."""
    count = 1 + len({name.split(".")[1] for name in weights if name.startswith("stack.")})
    if count > 1 and about.get("num_hidden_layers") != count:
        raise ValueError(
            f"its num_hidden_layers is {about.get('num_hidden_layers')!r}, and it has weights of "
            f"{count} layers"
        )
    return count


def _reads(about: Mapping[str, Any], weights: Mapping[str, Tensor], size: int) -> list[int]:
    """The numbers of the hidden states that ``fc`` joins; none: the usual three.

    Files name them in two ways. A list that begins with 1 numbers the target's layers from 0, whose
    outputs are the states one further up; any other numbers the states, of which the first is the
    embedding: nobody reads the state after the first layer first (SGLang, pull request 25454)."""
    given = about.get(LAYERS) or []
    fc = weights.get("fc.weight")
    joined = len(given) or 3 if fc is None or fc.dim() != 2 else fc.shape[1] / size
    if joined != len(given) and (given or joined != 3):
        named = f"{LAYERS} is {given}" if given else f"it has no {LAYERS}"
        raise ValueError(f"fc joins {joined:g} of its target's states, and {named}")
    outputs = given[:1] == [1] and not about.get(STATES)
    return [at + 1 for at in given] if outputs else list(given)


def _mask(about: Mapping[str, Any]) -> int:
    found = [about[name] for name in MASKS if about.get(name) is not None]
    if not found or type(found[0]) is not int:
        raise ValueError(f"it has a mask_hidden, and none of {list(MASKS)} is a token")
    return found[0]


def eagle3_config_dict(head: Eagle3) -> dict[str, Any]:
    """Returns the public configuration of a head."""
    config, layer = head.config, head.midlayer
    about = {
        "attention_bias": config.bias,
        "mlp_bias": False,
        "norm_before_residual": config.norm_before_residual,
        "draft_vocab_size": head.vocabulary,
        **layer_config_dict(head, layer.self_attn, layer.mlp.up_proj.out_features, config.layers),
        **{name: True for name in NORMS if getattr(config, name)},
        **config.latent,
    }
    if config.hidden_size:
        about["target_hidden_size"] = head.target.hidden_size
    if config.parallel:
        about |= {"num_depths": config.depths} | dict.fromkeys(MASKS[:2], config.mask_token)
    if not config.fused:
        about[NESTED] = {"use_aux_hidden_state": False}
    elif head.target.layers or config.reads:
        about[LAYERS] = list(head.hidden_layers)
        if head.hidden_layers[0] == 1:
            about[STATES] = True
    return about
