"""The names that checkpoints give the weights of their multi-token-prediction modules.

The names differ from family to family: these are those of the published folders, as vLLM's and
SGLang's loaders read them (``*_mtp.py``, ``*_nextn.py``).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

PREFIX = r"(?:model\.)?(?:language_model\.)?(?:model\.)?"

NUMBERED = re.compile(PREFIX + r"(?:layers|mtp\.layers|mtp_layers)\.(\d{1,6})\.(.+)")
"""Weights of a layer: DeepSeek's kin count on after the model's own, the others from 0."""

SHARED = re.compile(PREFIX + r"mtp\.([a-z_]+(?:\.m)?)\.(weight|bias)")
"""Weights around the layers of Qwen3-Next's kin, which all of its layers share."""

ERNIE = re.compile(PREFIX + r"mtp_(block|emb_norm|hidden_norm|linear_proj)\.(\d{1,6})\.(.+)")

PARTS = {
    "enorm": "enorm", "enorm.m": "enorm", "pre_fc_norm_embedding": "enorm",
    "token_layernorm": "enorm", "emb_norm": "enorm",
    "hnorm": "hnorm", "hnorm.m": "hnorm", "pre_fc_norm_hidden": "hnorm",
    "hidden_layernorm": "hnorm", "hidden_norm": "hnorm",
    "eh_proj": "eh_proj", "fc": "eh_proj", "input_proj": "eh_proj", "linear_proj": "eh_proj",
    "shared_head.norm": "post_norm", "final_layernorm": "post_norm",
    "embed_tokens": "embed", "shared_head.head": "head", "shared_head.output": "head",
}  # fmt: skip
"""What stands around the layers of a module, by what families call it."""

INSIDE = (("transformer.", ""), ("pre_mlp_layernorm.", "post_attention_layernorm."))
"""What checkpoints call parts of a layer otherwise in a module: Step's and MiMo V2's."""

UNLIKE = frozenset({"longcat_flash"})
"""Types of models whose modules have layers of another kind than the model's own."""

STATES_FIRST = "input_proj"
"""The only name of a joining matrix that reads the state before the embedding: MiMo's."""


class ModulePart(NamedTuple):
    """Where a weight of a module belongs."""

    number: int
    """The module's, from 0, or the layer's where a module has several."""
    part: str
    """"layer", or a value of `PARTS`."""
    name: str
    """Its name inside that."""


def place_of(name: str, layers: int) -> ModulePart | None:
    """Returns where a weight belongs, None if it is none of a module. layers: the model's own.

    >>> place_of("model.layers.61.shared_head.norm.weight", 61)
    ModulePart(number=0, part='post_norm', name='weight')
    >>> place_of("mtp.layers.0.self_attn.q_proj.weight", 48)
    ModulePart(number=0, part='layer', name='self_attn.q_proj.weight')
    >>> place_of("model.layers.60.mlp.gate.weight", 61)
    """
    if found := ERNIE.fullmatch(name):
        what, number, rest = found[1], int(found[2]), found[3]
        return ModulePart(number, *(("layer", rest) if what == "block" else (PARTS[what], rest)))
    if found := NUMBERED.fullmatch(name):
        number = int(found[1]) - (0 if "mtp" in name[: found.start(1)] else layers)
        return None if number < 0 else ModulePart(number, *_inside(found[2]))
    if found := SHARED.fullmatch(name):
        part = "post_norm" if found[1] == "norm" else PARTS.get(found[1], "unknown")
        return ModulePart(0, part, found[2])
    return None


def _inside(name: str) -> tuple[str, str]:
    """What a weight is inside of a module's own names."""
    for theirs, ours in INSIDE:
        name = name.replace(theirs, ours, 1) if name.startswith(theirs) else name
    stem, _, ending = name.rpartition(".")
    if stem in PARTS:
        return PARTS[stem], ending
    return "layer", name


ModuleNames = dict[str, dict[str, str]]
"""The weights of one module: by part and name inside it, the name in the checkpoint; those of the
n-th layer in "layer n"."""


def has_mtp_weights(names: Iterable[str], config: Any) -> bool:
    """Returns whether a checkpoint with these weights holds a module."""
    return any("eh_proj" in parts for parts in modules_in(names, config))


def modules_in(names: Iterable[str], config: Any) -> list[ModuleNames]:
    """Returns the modules of a checkpoint with these weights, each with what all share."""
    text = config.get_text_config(decoder=True)
    layers = int(getattr(text, "num_hidden_layers", 0))
    each = len(getattr(text, "mtp_layers_block_type", None) or ()) or 1  # layers of a module
    found: dict[int, ModuleNames] = defaultdict(lambda: defaultdict(dict))
    for name in () if text.model_type in UNLIKE else names:
        place = place_of(name, layers)
        if place is None:
            continue
        own = found[place.number // each]
        part = f"layer {place.number % each}" if place.part == "layer" else place.part
        own[part][place.name] = name
    modules = [found[number] for number in sorted(found)]
    for later in modules[1:]:
        for part in ("enorm", "hnorm", "eh_proj", "post_norm", "embed", "head"):
            if part in modules[0]:
                later.setdefault(part, modules[0][part])
    return modules
