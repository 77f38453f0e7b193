"""What an encoder makes of a source."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from outpace.errors import ConfigError
from outpace.targets.base import Source


@torch.inference_mode()
def encoded(model: nn.Module, source: Source) -> Tensor:
    """Returns the states ``[1, S, H]`` of a source, read by the model's encoder.

    Those that came with the source are taken as they are, if this model's encoder has made them.
    """
    loaded: Any = model
    if source.states is not None and source.encoder is model:
        return source.states.to(loaded.device)[None]
    arguments = {name: _moved(part, loaded) for name, part in source.features.items()}
    if not arguments and not source.token_ids:
        raise ConfigError(
            f"{type(model).__name__} reads sources with an encoder of its own, and was given only "
            "what another model's encoder made of one: hand over what is encoded, not "
            "encoder_outputs, or draft with a decoder-only model."
        )
    if not arguments:
        ids = torch.tensor([list(source.token_ids)], device=loaded.device)
        arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    states: Tensor = loaded.get_encoder()(**arguments, return_dict=True).last_hidden_state
    return states


def _moved(part: Tensor, model: Any) -> Tensor:
    """A feature as the encoder takes it, ``[1, ...]``."""
    kind = model.dtype if part.is_floating_point() else part.dtype
    return part.to(device=model.device, dtype=kind)[None]
