"""Checkpoints whose weights others have quantised: GPTQ, AWQ, FP8, compressed-tensors and so on.

Their config.json has a ``quantization_config``, and transformers has a quantiser for each method.
On a CPU, weights that a quantiser can dequantise become numbers when they are read, so that the
model is one like any other. Whether a quantiser finds here what it needs (a package, a GPU) is
asked before the weights are read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    AutoHfQuantizer,
    AutoQuantizationConfig,
)

from outpace.core.values import shown
from outpace.errors import UnsupportedModel, reason_of
from outpace.targets.hf.kinds import INSTALLED
from outpace.targets.hf.weights import weight_bytes

LOGGER = logging.getLogger("outpace")

NOTES = re.compile(
    r"\.(weight_scale(_inv|_2)?|input_scale|weight_packed|weight_zero_point|qweight|qzeros|g_idx"
    r"|SCB|weight\.(absmax|quant_map|quant_state\.\w+)|\w+_(blocks|scales))"
)
"""How the names end of what belongs to quantised weights: scales, codes, orders."""

BITSANDBYTES = "bitsandbytes"
UNNAMED = "a method without a name"

REMEDY = "name the model as it was before it was quantised, or a GGUF file of it"


def method_of(config: Any) -> str | None:
    """Returns how the weights of a model are quantised by its configuration; None for plain
    ones."""
    given = _given(config)
    if given is None:
        return None
    if given.get("load_in_4bit") or given.get("load_in_8bit"):
        return BITSANDBYTES
    return str(given.get("quant_method", UNNAMED))


def _given(config: Any) -> dict[str, Any] | None:
    """The entry of a configuration, which may stand in that of its text model."""
    for each in (config, config.get_text_config(decoder=True)):
        found = getattr(each, "quantization_config", None)
        if found is not None:
            return found if isinstance(found, dict) else found.to_dict()
    return None


def check_readable(config: Any, name: str, device: torch.device) -> str | None:
    """Asks for weights that are quantised as a configuration says to be dequantised on a CPU, where
    that can be done; returns the method then. Raises ``UnsupportedModel`` where transformers does
    not read them."""
    method, given = method_of(config), _given(config)
    if method is None or given is None:
        return None
    if method not in {*AUTO_QUANTIZER_MAPPING, BITSANDBYTES}:  # transformers would pass over it
        raise UnsupportedModel(
            f"the weights in {name!r} are quantised with {shown(method)}, which transformers "
            f"{INSTALLED} does not know: {REMEDY}."
        )
    dequantizes = device.type == "cpu" and method == BITSANDBYTES
    try:
        known: Any = AutoQuantizationConfig.from_dict(dict(given))
        if device.type == "cpu" and hasattr(known, "dequantize"):
            given["dequantize"] = known.dequantize = dequantizes = True
        reader: Any = AutoHfQuantizer.from_config(known, pre_quantized=True)
        reader.validate_environment(device_map=None, weights_only=True)
    except Exception as error:  # each quantiser raises what it likes
        raise UnsupportedModel(
            f"the weights in {name!r} are quantised with {method}, which transformers does not "
            f"read here ({reason_of(error).rstrip('.')}): do what it asks for, or {REMEDY}."
        ) from error
    return method if dequantizes else None


def dequantized(model: Any, method: str | None, name: str, dtype: str | torch.dtype) -> nn.Module:
    """Returns a model that was read, with plain weights where `check_readable` asked for them; a
    warning says how much memory they take. dtype: that it was read in, "auto" for the files'."""
    if method is None:
        return model  # type: ignore[no-any-return]
    if method == BITSANDBYTES:
        model = model.dequantize(model.dtype)
    own = model.get_input_embeddings().weight.dtype
    _convert(model, own if isinstance(dtype, str) else dtype)
    LOGGER.warning(
        "outpace: the weights of %s are dequantised from %s to numbers, %.2f GB in all.",
        name,
        method,
        weight_bytes(model) / 1e9,
    )
    return model  # type: ignore[no-any-return]


def _convert(model: Any, dtype: torch.dtype) -> None:
    """Converts the weights of a model to one dtype: quantisers leave some in that of their files,
    and others in that of their scales."""
    kept = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and not kept.intersection(name.split(".")):
            weight.data = weight.data.to(dtype)


# -- weights in float8 that transformers leaves out ------------------------------------------------


SCALES = ("_scale_inv", "_scale")
"""How the names of scales go on where those of their weights end."""


def is_scale(name: str) -> bool:
    """Returns whether a weight of a folder is the scale of another, or of what that reads."""
    return name.endswith((".input_scale", *(f".weight{end}" for end in SCALES)))


def scale_of(name: str, names: Collection[str]) -> str | None:
    """Returns what the scale of a weight is called among the names of a folder, if it has one."""
    return next((f"{name}{end}" for end in SCALES if f"{name}{end}" in names), None)


def fp8_block(about: Mapping[str, Any]) -> Sequence[int] | None:
    """Returns the rows and columns of a weight that share a scale, by a config.json; None where it
    does not say it."""
    given = about.get("quantization_config") or (about.get("text_config") or {}).get(
        "quantization_config"
    )
    return (given or {}).get("weight_block_size")


def dequantized_fp8(codes: Tensor, scale: Tensor, block: Sequence[int] | None) -> Tensor:
    """Returns the numbers, in float32, of float8 codes ``[..., O, I]``.

    scale: one for each block, ``[..., O / block, I / block]`` with part of a block at the ends, for
    each row, ``[..., O, 1]`` or ``[O]``, or for all. block: rows and columns of a block; None: as
    many as the scales say, where that comes out even, else ``ValueError``.
    """
    wide = scale.float()
    if wide.dim() == 1 and len(wide) > 1:
        wide = wide[:, None]
    for dim in (-2, -1) if wide.dim() > 1 else ():
        count, of = wide.shape[dim], codes.shape[dim]
        if count not in (1, of):
            if block is None and of % count:
                raise ValueError(f"{count} scales for {of} weights, and no weight_block_size")
            size = block[dim] if block is not None else of // count
            if count != -(-of // size):
                raise ValueError(f"{count} scales for {of} weights in blocks of {size}")
            wide = wide.repeat_interleave(size, dim).narrow(dim, 0, of)
    return codes.float() * wide


def check_whole(unexpected: Iterable[str], name: str) -> None:
    """Raises ``UnsupportedModel`` where weights were read without the scales that lie next to them:
    their configuration does not say that they are quantised.

    unexpected: names in the files for which the model has no place.
    """
    notes = sorted(each for each in unexpected if NOTES.search(each))
    if notes:
        raise UnsupportedModel(
            f"the weights in {name!r} are quantised ({notes[0]!r} belongs to one of them), and its "
            f"config.json does not say how: {REMEDY}."
        )
