"""Loading a model from GGUF files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outpace.errors import ConfigError, OutpaceError, UnsupportedModel, reason_of
from outpace.targets.cpu.weights.blocks import KINDS, block_bytes
from outpace.targets.hf import support, trials
from outpace.targets.hf.attention import attention_for
from outpace.targets.hf.gguf.architecture import config_of, no_such_model
from outpace.targets.hf.gguf.building import empty_model, filled, tiny_model_of
from outpace.targets.hf.gguf.file import PLAIN, GGUFModel, of_layers, read_model
from outpace.targets.hf.gguf.vocabulary import generation_config_of, tokenizer_of
from outpace.targets.hf.loading.lora import Adapter, check_fits, merge
from outpace.targets.hf.partial.layers import with_layers

LOGGER = logging.getLogger("outpace")

COMPUTED = (torch.float32, torch.float64)
"""Dtypes in which layers compute whose weights are in blocks."""


def read_gguf_tokenizer(path: str) -> Any:
    """Returns the tokenizer of a GGUF file, None if it has none."""
    return tokenizer_of(read_model(Path(path)))


def read_dequantized(path: str, kept: Sequence[int] | None = None) -> nn.Module:
    """Returns the model of a GGUF file with all weights as numbers in float32, in transformers' own
    layers: to learn from there, which blocks cannot.

    kept: the numbers of its layers that the model has, in their order; None: all. The blocks of
    others are not dequantised. Raises ``UnsupportedModel`` for a model that cannot do without them.
    """
    model = read_model(Path(path))
    config = config_of(model)
    support.check_config(config)
    if kept is not None:
        return _shortened(model, config, kept)
    try:
        built = empty_model(config, torch.float32, None)
        return filled(model, built, torch.float32, packed=False)
    except OutpaceError:
        raise
    except Exception as error:  # models raise all sorts over configurations that make no sense
        raise no_such_model(model, error) from error


def _shortened(model: GGUFModel, config: Any, kept: Sequence[int]) -> nn.Module:
    count = int(config.num_hidden_layers)
    try:
        built = empty_model(with_layers(config, count, kept), torch.float32, None)
        return filled(of_layers(model, kept), built, torch.float32, packed=False)
    except Exception as error:  # with all its layers it was read
        raise UnsupportedModel(
            f"the layers of {model.path} cannot be left out ({reason_of(error)}): begin with a "
            "folder, without layers, or with --start random."
        ) from error


def load_gguf(
    model: GGUFModel,
    tokenizer: Any,
    dtype: torch.dtype | str,
    device: torch.device,
    report: Callable[[str, float], None],
    check: Callable[[Any], None] = support.check_config,
    adapter: Adapter | None = None,
) -> tuple[nn.Module, Any]:
    """Returns the model of a GGUF file, and its tokenizer unless one is given.

    dtype: of the activations, and of weights that are in no blocks. On a CPU, weights in blocks
    stay so, in memory that the file is mapped to; on a GPU they are dequantised. check: raises what
    a configuration shows to be wrong, before the weights are read. adapter: is merged into the
    weights, of which those that it changes are dequantised.
    """
    config = config_of(model)
    check(config)
    kind = _dtype(model, dtype, device)
    report("converting the tokenizer", 0.05)
    known = tokenizer_of(model) if tokenizer is None else tokenizer
    report("reading the weights", 0.3)
    packed = device.type == "cpu"
    try:
        built: Any = empty_model(config, kind, attention_for(config))
        built.generation_config = generation_config_of(model)
        if adapter is not None:
            check_fits(adapter, built)
        filled(model, built, kind, packed, set() if adapter is None else adapter.changed)
        if adapter is not None:
            merge(adapter, built)
    except OutpaceError:
        raise
    except Exception as error:  # models raise all sorts over configurations that make no sense
        raise no_such_model(model, error) from error
    if packed and model.packed:  # and now that its sizes are known to be those of its weights
        _try_likeness(model, config, kind)
    _say_what_is_dequantized(model, built, packed, adapter is not None)
    return built.to(device), known


def _try_likeness(model: GGUFModel, config: Any, dtype: torch.dtype) -> None:
    """Raises ``UnsupportedModel`` unless a small model of the same kind scores drafts as it reads
    plain texts."""
    try:
        tiny = tiny_model_of(config, dtype, attention_for(config))
    except Exception as error:  # as for the model itself
        raise no_such_model(model, error) from error
    support.check(tiny)
    trials.probe(tiny)


def _dtype(model: GGUFModel, dtype: torch.dtype | str, device: torch.device) -> torch.dtype:
    if isinstance(dtype, str):  # "auto" on a GPU
        return torch.bfloat16
    if device.type == "cpu" and model.packed and dtype not in COMPUTED:
        raise ConfigError(
            f"the weights in {model.path} are in blocks, and layers of these compute in float32 on "
            f"a CPU, not in {str(dtype).removeprefix('torch.')}: leave dtype out."
        )
    return dtype


def _say_what_is_dequantized(
    model: GGUFModel, built: nn.Module, packed: bool, merged: bool
) -> None:
    """Warns where weights in blocks take several times the memory of the file."""
    inside = {kind: nbytes for kind, nbytes in model.kinds.items() if kind not in PLAIN}
    held, whole = sum(block_bytes(built).values()), sum(inside.values())
    if held >= whole:
        return
    others = [kind for kind in inside if kind not in KINDS]
    why = ", because blocks are computed on a CPU only"
    if packed:
        why = f", because outpace has no products of {' and '.join(others)}" if others else ""
        why = ", because the adapter changes them" if merged else why
    LOGGER.warning(
        "outpace: weights of %s are dequantised from %.2f GB of blocks to numbers, %.2f GB in all"
        "%s.",
        model.path,
        (whole - held) / 1e9,
        sum(p.nbytes for p in built.parameters()) / 1e9,
        why,
    )
