"""The hidden states of a model in a fixed text, by which a network that was trained over a model's
states recognises that model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outpace.errors import UnsupportedModel
from outpace.targets.hf.loading.loaded import Loaded
from outpace.targets.hf.seq2seq.lengths import is_encoder_decoder
from outpace.targets.hf.supported.plainly import forward_mask

LENGTH = 8
"""Tokens of the text. They are arbitrary ones, the same for every model of a vocabulary."""


@torch.no_grad()
def greeting(loaded: Loaded) -> Tensor:
    """Returns the last hidden states ``[LENGTH - 1, H]`` in the fixed text, in float32 on the CPU.
    That at the first token is left out: many models have the same outsized one for any text."""
    model: Any = loaded.model
    if is_encoder_decoder(model):
        raise UnsupportedModel(
            f"{loaded.name} is an encoder-decoder, and classifiers learn from texts without a "
            "source: use a decoder-only model."
        )
    size = loaded.vocabulary
    tokens = [(7 + 31 * at) % size for at in range(LENGTH)]
    output = model(
        input_ids=torch.tensor([tokens], device=loaded.device),
        use_cache=False,
        output_hidden_states=True,
        **forward_mask(model, LENGTH),
    )
    states: Tensor = output.hidden_states[-1][0, 1:]
    return states.float().cpu()
