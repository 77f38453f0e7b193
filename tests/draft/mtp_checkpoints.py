"""Folders of tiny random models with multi-token-prediction modules, under the published names.

A module's layers are the last ones of a larger model, so that the larger model computes what the
module should.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from lab.families.models import random_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from devices import DEVICE, on_device
from targets.families import BASE, FAMILIES, RECURRENT, WINDOW

WIDTH = 32
FULL, LINEAR, SLIDING = "full_attention", "linear_attention", "sliding_attention"
NORMS = ("norm", "norm_f")

DEEPSEEK = {
    "enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head.norm",
}  # fmt: skip
QWEN = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "post_norm": "norm",
}
FINAL = {**DEEPSEEK, "post_norm": "final_layernorm"}


@dataclass(frozen=True)
class Family:
    """A family whose checkpoints bring modules."""

    config: str
    options: Mapping[str, Any]
    """Options of the larger model: its last layers are the module's."""
    layer: str
    """How a weight of the module's layer n is called: "{n}", or "{N}" counted after the others."""
    around: str
    """How the weights around it are called, "{part}" being one of `parts`."""
    parts: Mapping[str, str] = field(default_factory=lambda: DEEPSEEK)
    layers: int = 1
    """Layers of a module."""
    modules: int = 1
    lists: tuple[str, ...] = ("layer_types", "mlp_layer_types")
    """Entries of the configuration with a value for each layer."""
    renamed: Callable[[str], str] = lambda name: name
    """What a weight inside a layer is called in a module."""
    offset: float = 0.0
    """What norms add to their weights."""
    states_first: bool = False
    fused: bool = False
    """Whether published checkpoints hold all experts of a layer in one weight."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """What config.json says of modules."""


def _of(family: Any, **more: Any) -> dict[str, Any]:
    return {**family.options, **more}


AFTER = "model.layers.{N}."
MTP = {"layer": "mtp.layers.{n}.", "around": "mtp.{part}", "parts": QWEN}
DENSE_AFTER = {"mlp_layer_types": ["dense", "sparse", *["dense"] * 3]}
DENSE_LAST = {"mlp_layer_types": ["dense", "sparse", "dense"]}
MIXED = {
    "head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}

# The names are those that vLLM's and SGLang's loaders read: deepseek_mtp.py, glm4_moe_mtp.py,
# qwen3_next_mtp.py, qwen3_5_mtp.py, exaone_moe_mtp.py, mimo_mtp.py, mimo_v2_mtp.py, ernie_mtp.py
# and nemotron_h_mtp.py of vLLM, bailing_moe_nextn.py of SGLang.
BROUGHT: Mapping[str, Family] = {
    "deepseek_v3": Family(
        "DeepseekV3Config", _of(FAMILIES["deepseek_v3"]), AFTER, AFTER + "{part}",
        more={"num_nextn_predict_layers": 1},
    ),
    "deepseek_v3-2": Family(
        "DeepseekV3Config", _of(FAMILIES["deepseek_v3"]), AFTER, AFTER + "{part}", modules=2,
        more={"num_nextn_predict_layers": 2},
    ),
    "deepseek_v32": Family(
        "DeepseekV32Config",
        _of(FAMILIES["deepseek_v32"], mlp_layer_types=["dense", "sparse", "sparse"]),
        AFTER, AFTER + "{part}", more={"num_nextn_predict_layers": 1},
    ),
    "glm4_moe": Family(
        "Glm4MoeConfig",
        {**MIXED, "first_k_dense_replace": 1, "n_shared_experts": 1, "use_qk_norm": True},
        AFTER, AFTER + "{part}", more={"num_nextn_predict_layers": 1},
    ),
    "qwen3_next": Family(
        "Qwen3NextConfig",
        _of(RECURRENT["qwen3_next"], layer_types=[LINEAR, FULL, FULL]),
        **MTP, offset=1.0,
    ),
    "qwen3_5": Family(
        "Qwen3_5TextConfig",
        _of(RECURRENT["qwen3_5"], layer_types=[LINEAR, FULL, FULL]),
        **MTP, offset=1.0, more={"mtp_num_hidden_layers": 1},
    ),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeTextConfig",
        _of(RECURRENT["qwen3_5_moe"], layer_types=[LINEAR, FULL, FULL]),
        **MTP, offset=1.0, fused=True, more={"mtp_num_hidden_layers": 1},
    ),
    "mimo_v2_flash": Family(
        "MiMoV2FlashConfig",
        {
            **MIXED, **DENSE_AFTER, "v_head_dim": 4, "num_key_value_heads": 1,
            "sliding_window": WINDOW, "layer_types": [FULL, *[SLIDING] * 4],
        },
        "model.mtp.layers.{n}.", "model.mtp.layers.{n}.{part}", FINAL, modules=3,
        renamed=lambda name: name.replace(
            "post_attention_layernorm", "pre_mlp_layernorm"
        ).replace("sinks", "attention_sink_bias"),
    ),
    "mimo": Family(  # MiMo 7B, which is a Qwen2
        "Qwen2Config", {}, "model.mtp_layers.{n}.", "model.mtp_layers.{n}.{part}",
        {
            "enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj",
            "post_norm": "final_layernorm",
        },
        states_first=True, more={"num_nextn_predict_layers": 1},
    ),
    "nemotron_h": Family(
        "NemotronHConfig",
        _of(
            RECURRENT["nemotron_h"], num_hidden_layers=4, n_routed_experts=4, n_group=1,
            moe_intermediate_size=16, moe_shared_expert_intermediate_size=16, topk_group=1,
            layers_block_type=["mamba", "attention", "attention", "moe"],
        ),
        "mtp.layers.{n}.", "mtp.layers.{n}.{part}", FINAL, layers=2, lists=("layers_block_type",),
        more={"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"},
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeConfig",
        {
            "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16,
            "moe_num_shared_experts": 1, "moe_layer_start_index": 1, "moe_layer_end_index": 1,
        },
        "model.mtp_block.{n}.", "model.{part}.{n}",
        {"enorm": "mtp_emb_norm", "hnorm": "mtp_hidden_norm", "eh_proj": "mtp_linear_proj"},
        more={"num_nextn_predict_layers": 1},
    ),
    "exaone_moe": Family(
        "ExaoneMoeConfig",
        {
            "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "num_shared_experts": 1, "n_group": 1, "topk_group": 1, "sliding_window": WINDOW,
            "layer_types": [SLIDING, FULL, FULL], **DENSE_LAST,
        },
        **MTP, more={"num_nextn_predict_layers": 1},
    ),
    "bailing_hybrid": Family(
        "BailingHybridConfig",
        _of(
            RECURRENT["bailing_hybrid"], layer_types=[LINEAR, FULL, FULL],
            mlp_layer_types=["dense", "sparse", "sparse"],
        ),
        AFTER, AFTER + "{part}", FINAL,
        renamed=lambda name: name.replace("self_attn.o_proj", "attention.dense")
        .replace("self_attn.", "attention.")
        .replace("gate.e_score_correction_bias", "gate.expert_bias"),
        more={"num_nextn_predict_layers": 1},
    ),
}  # fmt: skip


def whole(family: str) -> Any:
    """The larger model: two layers of the target's, then those of the module."""
    one = BROUGHT[family]
    count = 2 + one.layers * one.modules
    options = {**BASE, "num_hidden_layers": count, **one.options}
    model = random_model(getattr(transformers, one.config)(**options))
    with torch.no_grad():
        generator = torch.Generator().manual_seed(3)
        for name, weight in model.named_parameters():  # norms that do something
            if "norm" in name and weight.dim() == 1:
                weight.add_(torch.rand(weight.shape, generator=generator, dtype=weight.dtype))
    return model.to(DEVICE)


def extras(family: str, number: int = 0) -> dict[str, Tensor]:
    """What stands around the layers of a module."""
    generator = torch.Generator().manual_seed(number)
    found = {}
    for part in BROUGHT[family].parts:
        if part == "eh_proj":
            weight = torch.randn(WIDTH, 2 * WIDTH, generator=generator, dtype=torch.float64) * 0.2
            weight[:, WIDTH:] += torch.eye(WIDTH)
        else:
            weight = 1 + torch.rand(WIDTH, generator=generator, dtype=torch.float64)
            weight -= BROUGHT[family].offset
        found[part] = weight
    return found


def _of_experts(name: str, weight: Tensor) -> dict[str, Tensor]:
    """A weight as it is published: that of each expert for itself."""
    stem, _, what = name.rpartition("experts.")
    if not stem or what not in ("gate_up_proj", "up_proj", "down_proj"):
        return {name: weight}
    halves = (
        {what: weight}
        if what != "gate_up_proj"
        else {
            part: half
            for part, half in zip(("gate_proj", "up_proj"), weight.chunk(2, 1), strict=True)
        }
    )
    return {
        f"{stem}experts.{number}.{part}.weight": own.clone()
        for part, rows in halves.items()
        for number, own in enumerate(rows)
    }


def write(folder: Path, family: str, model: Any) -> Path:
    """Writes the first two layers of a larger model, with a module of the others."""
    one = BROUGHT[family]
    model.save_pretrained(folder)
    saved = load_file(folder / "model.safetensors")
    weights: dict[str, Tensor] = {}
    for name, weight in saved.items():
        weights |= {name: weight} if one.fused else _of_experts(name, weight)
    named = {}
    for name, weight in weights.items():
        found = re.fullmatch(r"(.*\blayers\.)(\d+)\.(.+)", name)
        number = 0 if found is None else int(found[2]) - 2
        if found is None or number < 0:
            named[name] = weight
        else:
            place = one.layer.format(n=number, N=2 + number)
            named[place + one.renamed(found[3])] = weight
    for number in range(one.modules):
        for part, weight in extras(family, number).items():
            layer = number * one.layers + (one.layers - 1 if part == "post_norm" else 0)
            place = one.around.format(part=one.parts[part], n=layer, N=2 + layer)
            named[f"{place}.weight"] = weight
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    about = json.loads((folder / "config.json").read_text())
    about |= {"num_hidden_layers": 2, **one.more}
    for entry in one.lists:
        if isinstance(about.get(entry), list):
            about[entry] = about[entry][:2]
    (folder / "config.json").write_text(json.dumps(about))
    return folder


def loaded(folder: Path) -> Any:
    """The target, as transformers loads it: without the module."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    )
    return model.to(DEVICE).eval()


def without_float32(patch: Any) -> None:
    """Has transformers' code round nothing to float32, as norms, routers and recurrent layers do:
    the last bit of an input in float64 may show there."""
    for name in ("float", "float32"):
        patch.setattr(torch, name, torch.float64)
    patch.setattr(torch.Tensor, "float", torch.Tensor.double)


class Reference:
    """The published formula, each draft computed anew over the whole text, without a cache."""

    def __init__(self, family: str, larger: Any, target: Any) -> None:
        self._one, self._target = BROUGHT[family], target
        self._modules = [_Module(family, number, larger) for number in range(self._one.modules)]

    @torch.no_grad()
    def logits(self, text: list[int], states: Tensor, drafted: list[int]) -> Tensor:
        """The logits of the token after a text and what was drafted after it, ``[V]``. states: the
        target's last hidden states of all but the last token, ``[T - 1, H]``."""
        features, tokens = states[None], on_device([text[1:]])
        outputs = self._run(0, features, tokens)
        for depth, token in enumerate(drafted, 1):
            tokens = torch.cat([tokens, on_device([[token]])], 1)
            if self._one.modules > 1:  # the next module, over the outputs of the one before
                outputs = self._run(depth, outputs, tokens[:, depth:])
            else:  # the same one, on its own output
                features = torch.cat([features, outputs[:, -1:]], 1)
                outputs = self._run(0, features, tokens)
        found: Tensor = self._target.lm_head(outputs[0, -1])
        return found

    def _run(self, number: int, features: Tensor, tokens: Tensor) -> Tensor:
        return self._modules[number](self._target.get_input_embeddings()(tokens), features)


class _Module:
    """One module: its layers are those of the larger model."""

    def __init__(self, family: str, number: int, larger: Any) -> None:
        one = BROUGHT[family]
        decoder = copy.deepcopy(larger.get_decoder())
        begin = 2 + number * one.layers
        decoder.layers = decoder.layers[begin : begin + one.layers]
        config = decoder.config
        for entry in one.lists:
            if (listed := getattr(config, entry, None)) is not None:
                setattr(config, entry, listed[begin : begin + one.layers])
        config.num_hidden_layers = one.layers
        own = extras(family, number)
        norm = next(name for name in NORMS if hasattr(decoder, name))
        around = {name: copy.deepcopy(getattr(decoder, norm)) for name in ("enorm", "hnorm")}
        with torch.no_grad():
            for name, each in {**around, "post_norm": getattr(decoder, norm)}.items():
                if name in own:
                    each.weight.copy_(own[name])
        self._decoder, self._around = decoder, nn.ModuleDict(around)
        self._joined = own["eh_proj"].to(DEVICE)
        self._states_first = one.states_first

    def __call__(self, embedded: Tensor, features: Tensor) -> Tensor:
        pair = [self._around["enorm"](embedded), self._around["hnorm"](features)]
        x = torch.cat(pair[::-1] if self._states_first else pair, -1) @ self._joined.T
        found: Tensor = self._decoder(inputs_embeds=x, use_cache=False).last_hidden_state
        return found
