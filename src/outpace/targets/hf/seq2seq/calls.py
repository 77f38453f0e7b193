"""What a ``generate`` call of an encoder-decoder hands over, row by row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from outpace.errors import ConfigError, PromptError
from outpace.targets.base import Source
from outpace.targets.hf.seq2seq.audio import FEATURES
from outpace.targets.hf.seq2seq.placing import Placing

_OF_SOURCES = ("encoder_outputs", "attention_mask")
_OF_DECODER = "decoder_"


def of_decoder(model: nn.Module, model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that are about the decoder's tokens, named as in a call of a
    decoder-only model.

    Raises ``ConfigError`` for padding where the model would count it as text.
    """
    own = {
        name.removeprefix(_OF_DECODER): value
        for name, value in model_kwargs.items()
        if name not in _OF_SOURCES
    }
    mask = own.get("attention_mask")
    if mask is not None and not bool(mask.bool().all()) and Placing(model).counts_padding:
        raise ConfigError(
            f"{type(model).__name__} counts the padding of decoder_input_ids as tokens: give "
            "decoder prompts of one length, or one call for each."
        )
    return own


def sources_of(
    model: nn.Module, rows: int, model_kwargs: Mapping[str, Any], asked: Mapping[str, Any]
) -> list[Source]:
    """Returns the source of each row: the states that ``generate`` has had encoded already, and
    what they were made of, for drafters that read it themselves.

    asked: the variables of the ``generate`` call. Raises ``PromptError`` for a source of padding
    only.
    """
    states: Tensor = model_kwargs["encoder_outputs"][0]
    mask = model_kwargs.get("attention_mask")
    if mask is None or mask.shape != states.shape[:2]:  # Whisper's is about samples, and not used
        mask = torch.ones(states.shape[:2], device=states.device)
    keep = mask.bool().to(states.device)
    for row, kept in enumerate(keep.any(1).tolist()):
        if not kept:
            raise PromptError(
                f"row {row} of the sources is empty or all padding: give it at least one token."
            )
    given, name = asked.get("inputs_tensor"), asked.get("model_input_name")
    return [
        Source(
            **_raw(given, name, row * len(given) // rows, keep[row]) if given is not None else {},
            states=states[row, keep[row]],
            encoder=model,
        )
        for row in range(rows)
    ]


def _raw(given: Tensor, name: str | None, row: int, keep: Tensor) -> dict[str, Any]:
    """What the encoder has read of one row, as arguments of a `Source`."""
    if name == FEATURES:
        return {"features": {FEATURES: given[row]}}
    # Where only states were given, generate lets a stand-in come before them: tokens below 0 for
    # a ModelOutput, one token for a tuple.
    if name != "input_ids" or given[row].shape != keep.shape or int(given[row].min()) < 0:
        return {}
    return {"token_ids": given[row][keep.to(given.device)].tolist()}
