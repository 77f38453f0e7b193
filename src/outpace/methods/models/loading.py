"""From a user's options to a loaded draft model."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch import nn

from outpace.core.progress import Progress, part, silent
from outpace.errors import ConfigError
from outpace.methods.models.options import DraftModelOptions
from outpace.targets.cpu.kernels import Kernels
from outpace.targets.hf.loading.load import load_drafter
from outpace.targets.hf.loading.loaded import LoadedModel

OF_LOADING = ("dtype", "device", "quantization", "lora", "trust_remote_code")
"""Options that say how to load a draft model, and mean nothing to a loaded one."""


def load_draft_model(
    options: DraftModelOptions,
    target: LoadedModel,
    kernels: Kernels = "auto",
    compiled: bool = False,
    progress: Progress = silent,
) -> LoadedModel:
    """Returns the draft model that a user's options ask for, with a target.

    kernels: those of the target, which it has as well unless it learns or its weights are rounded
    in a way of its own. compiled: whether its passes will be compiled. One that learns online has
    plain weights. Raises as `load_drafter` does.
    """
    learns = options.online is not None
    if learns:
        kernels = "off"
    elif options.quantization not in (None, "auto"):
        kernels = "auto"
    return load_drafter(
        options.model,
        target,
        tokenizer=options.tokenizer,
        processor=options.processor,
        dtype=options.dtype,
        device=options.device,
        cpu_kernels=kernels,
        quantization=None if learns else options.quantization,
        lora=options.lora,
        trust_remote_code=options.trust_remote_code,
        progress=part(progress, 0.0, 1.0, "draft model"),
        compiled=compiled,
    )


def trainable_copy(model: Any) -> Any:
    """Returns a model that was handed over as another object, whose weights may be changed; a path
    as it is. ``ConfigError`` for weights that cannot learn."""
    if isinstance(model, LoadedModel):
        if model.packed or model.quantization or model.cpu_kernels not in (None, "off"):
            raise ConfigError(
                f"the weights of {model.name} are laid out for drafting and cannot learn: name its "
                "folder instead."
            )
        return replace(model, model=copy.deepcopy(model.model))
    return copy.deepcopy(model) if isinstance(model, nn.Module) else model
