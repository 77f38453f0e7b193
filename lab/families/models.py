"""Tiny random models of any family, in float64, on which equal texts are no luck.

Their configuration is made from the one that the family has by default. What makes a family what it
is stays: the order and the types of its layers, whether query heads share key heads, its experts,
its ways of telling positions. Only sizes shrink.

float64, because in narrower types one argmax in some dozens differs between a batched and a
single pass. Weights are scaled up so that the argmax varies from token to token, which with the
usual initialisation it does not."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lab.families.listing import Family, Kind
from lab.families.prompts import concerns_dtype, prompts_for
from lab.families.sizes import DECODERS, DEFAULTS, EXCEPTIONS, IMAGE, LAYERS, SHARED_HEADS, tiny

_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
"""What configurations call the number of their layers."""
_SHARED = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_query_groups")
_INDICES = frozenset(
    {
        "full_attn_idxs",
        "hybrid_layer_ids",
        "moe_layers",
        "ple_layer_ids",
        "mlp_only_layers",
        "cross_attention_layers",
        "deepstack_visual_indexes",
        "fullatt_block_indexes",
        "rope_scaling_layers",
    }
)
"""Lists of the numbers of some layers, where other lists have an entry for every layer."""
_SIZES = frozenset({"image_size", "patch_size"})
"""What may be a height and a width."""
_UNTOUCHED = frozenset(
    {"id2label", "label2id", "chunk_size_feed_forward", "per_layer_config", "transformers_version"}
)


def tiny_config(family: str, **changes: Any) -> Any:
    """Returns a tiny configuration of a family, given by its ``model_type``.

    changes: options beyond those, which win.
    """
    kind = CONFIG_MAPPING[family]
    made = _shrunk(kind(**DEFAULTS.get(family, {})))
    return kind(**_merged(_merged(made, EXCEPTIONS.get(family, {})), changes))


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``base`` with the entries of ``over``, those of configurations inside it too."""
    merged = dict(base)
    for name, value in over.items():
        inner = name.endswith("_config") and isinstance(value, Mapping)
        merged[name] = _merged(merged.get(name) or {}, value) if inner else value
    return merged


def _shrunk(config: Any) -> dict[str, Any]:
    """Returns the options of a configuration that have other values in a tiny one."""
    options = dict(_options(config))
    count = next((name for name in _COUNTS if isinstance(options.get(name), int)), None)
    kept = _kept_layers(options, options[count]) if count is not None else []
    made: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, PretrainedConfig):
            made[name] = {**_own(value), **_shrunk(value)}
        elif name in _SIZES and isinstance(value, (list, tuple)):
            made[name] = [tiny(name, side) for side in value]
        elif isinstance(value, (list, tuple)):
            made[name] = _of_layers(name, value, kept, options.get(count or ""))
        elif name == count:
            made[name] = len(kept)
        elif name in _SHARED:
            heads = options.get("num_attention_heads")
            made[name] = tiny("num_heads", value) if value == heads else min(SHARED_HEADS, value)
        elif name == "window_size" and "patch_size" in options:
            made[name] = min(value, IMAGE)  # in pixels: a window holds whole patches
        elif isinstance(value, int):
            made[name] = tiny(name, value)
    return {name: value for name, value in made.items() if value != options[name]}


def _own(config: Any) -> dict[str, Any]:
    """Returns the options in which a configuration inside another one differs from its class."""
    found: dict[str, Any] = config.to_diff_dict()
    return {name: value for name, value in found.items() if name not in _UNTOUCHED}


def _options(config: Any) -> Iterator[tuple[str, Any]]:
    """Yields the options that have a size: numbers, lists and inner configurations."""
    for name, value in vars(config).items():
        if name.startswith("_") or name in _UNTOUCHED or isinstance(value, bool):
            continue
        listed = isinstance(value, (list, tuple)) and name in _SIZES | _INDICES
        if isinstance(value, (int, list, PretrainedConfig)) or listed:
            yield name, value


def _kept_layers(options: Mapping[str, Any], layers: int) -> list[int]:
    """Returns the numbers of the layers to keep: the first of each type, and at least two."""
    listed = [
        value for name, value in options.items() if isinstance(value, list) and name not in _INDICES
    ]
    types: dict[tuple[Any, ...], int] = {}
    for layer in range(layers):
        own = [value[layer] for value in listed if len(value) == layers]
        chosen = [layer in options[name] for name in _INDICES if name in options]
        types.setdefault((*map(str, own), *chosen), layer)
    more = [layer for layer in range(layers) if layer not in types.values()]
    return sorted([*types.values(), *more[: max(0, LAYERS - len(types))]])


def _of_layers(name: str, value: Sequence[Any], kept: Sequence[int], layers: Any) -> list[Any]:
    """Returns what a list says of the kept layers."""
    if name in _INDICES:
        return [place for place, layer in enumerate(kept) if layer in value]
    if name.endswith("token_id"):
        return [tiny(name, token) for token in value]
    if len(value) != layers:
        return list(value)
    own = [value[layer] for layer in kept]
    return [tiny(name, one) if type(one) is int else one for one in own]


# -- weights -----------------------------------------------------------------------------------


SCALE = 6.0
OWN_SCALE = ("A_log", "conv")
"""Weights that random initialisation leaves at a useful size: decays, and short convolutions."""
EXACT = (torch.float64, torch.float32)
"""Types to try: some models compute parts in float32, and stumble over wider weights."""


def tiny_model(
    one: Family, seed: int = 1, scale: float = SCALE, device: str | torch.device = "cpu"
) -> Any:
    """Returns a random model of a family, in the widest type that it can compute in.

    Its weights are the same on every device. Raises what its class raises where no model can be
    made.
    """
    kind, config = getattr(transformers, one.model), tiny_config(one.family)
    config = getattr(config, DECODERS.get(one.family, ""), config)
    if not isinstance(config, kind.config_class):
        parts = [part for part in vars(config).values() if isinstance(part, kind.config_class)]
        config = parts[0] if parts else config
    for dtype in EXACT:
        model = random_model(config, kind, seed, scale, dtype=dtype).to(device)
        if _computes(model, one.kind):
            break
    return model


def _computes(model: Any, kind: Kind) -> bool:
    """Whether a model takes the dtype that it was made in. Other errors say nothing of that."""
    try:
        with torch.inference_mode():
            model(**prompts_for(model, kind)[0].arguments(model.device))
    except Exception as error:  # whoever uses the model meets it again, and says so
        return not concerns_dtype(error)
    return True


def random_model(
    config: Any,
    kind: Any = transformers.AutoModelForCausalLM,
    seed: int = 1,
    scale: float = SCALE,
    attention: str | None = None,
    dtype: torch.dtype = torch.float64,
) -> Any:
    """Returns a model whose weights depend on the configuration and the seed only.

    kind: a model's class, or one of transformers' automatic ones. attention: its kernel; unset:
    the one that outpace would load the model with.
    """
    make = getattr(kind, "_from_config", None) or kind.from_config
    text = config.get_text_config(decoder=True)
    if attention is None and getattr(text, "attn_logit_softcapping", None):
        attention = "eager"  # the only kernel with the soft cap
    torch.manual_seed(seed)
    # The grouped kernels of the mixtures of experts know no float64.
    options = {"attn_implementation": attention, "experts_implementation": "eager"}
    model = make(config, dtype=dtype, **options).eval()
    with torch.no_grad():
        for part, weight in model.named_parameters():
            if weight.dim() > 1 and not any(own in part for own in OWN_SCALE):
                if not weight.any():  # Gemma 3 would see nothing
                    weight.normal_(std=0.02)
                weight.mul_(scale)
    return model


def noised(model: Any, noise: float, seed: int = 2) -> Any:
    """Returns a copy whose weights are off by ``noise`` of their spread: a drafter that is right
    some of the time."""
    generator = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            spread = weight.std() if weight.dim() > 1 else 0.1
            error = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            weight.add_(noise * spread * error.to(weight.device))
    return other
