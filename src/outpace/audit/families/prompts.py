"""What a model is given: token ids, a source for its encoder, or images between tokens.

The same prompt is given to transformers' ``generate`` and to outpace.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from outpace.audit.families.images import seen
from outpace.audit.families.listing import Kind

TEXTS = ([5, 6, 7, 8, 9], [1], [2, 3] * 6)
"""Ragged: shorter than every window, one token, longer than every window."""
BEGINNINGS: Sequence[Sequence[int]] = ((), (4, 5, 6, 7), (9,))
"""What the decoders of the three rows begin with, behind the token that all texts start with."""
IMAGE = -1
"""Stands for an image."""
ILLUSTRATED = ([5, 6, IMAGE, 7, 8], [9, 10, 11], [IMAGE, 3, 4, *[2, 3] * 6])
"""With an image inside, without any, and with one in front."""
FEATURES = "input_features"
"""The argument of audio, where outpace reads it."""
_PLACES = tuple(
    f"{medium}_token_{end}" for medium in ("image", "video", "audio") for end in ("id", "index")
)
"""Options that have the tokens that stand for media."""
_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Arguments that mark the tokens that stand for images."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """One prompt: as outpace takes it, and as transformers does."""

    given: Any
    """For ``LLM.generate``."""
    token_ids: Sequence[int]
    """Behind which the text is written."""
    name: str = "input_ids"
    """The argument that has these."""
    more: Mapping[str, Tensor] = field(default_factory=dict)
    """Further arguments."""

    def arguments(self, device: torch.device, text: Sequence[int] = ()) -> dict[str, Any]:
        """Returns the arguments of a pass over the prompt and a text behind it."""
        ids = torch.tensor([[*self.token_ids, *text]])
        marks = {name: pad(self.more[name], (0, len(text))) for name in _TYPES if name in self.more}
        found = {self.name: ids, **self.more, **marks}
        return {name: value.to(device) for name, value in found.items()}


def prompts_for(model: Any, kind: Kind) -> list[Prompt]:
    """Returns three prompts for a model; of text only where no image can be made for it. Raises
    ``ValueError`` where nothing says how its texts start."""
    if is_encoder_decoder(model):
        return _with_sources(model)
    placeholder = _placeholder(model.config)
    shown = seen(model, 1) if kind == "image-text" and placeholder is not None else None
    if shown is not None and placeholder is not None:
        return _with_images(model, placeholder, *shown)
    marks = placeholders(model.config)
    texts = [[_other_than(marks, token) for token in text] for text in TEXTS]
    return [Prompt(text, text) for text in texts]


def is_encoder_decoder(model: Any) -> bool:
    """Whether a model reads a source with an encoder, and is not the decoder alone."""
    alone = type(model).__name__.endswith("ForCausalLM")
    return bool(model.config.is_encoder_decoder) and not alone


def leaves_out(model: Any, kind: Kind, prompts: Sequence[Prompt]) -> str:
    """Returns in words what these prompts do not have though the model can be given it."""
    if is_encoder_decoder(model) and model.main_input_name != FEATURES:
        absent = {"image-text": "images", "speech": "audio"}.get(kind)
        return f"sources of text only, without {absent}" if absent else ""
    if is_encoder_decoder(model):
        return ""
    if kind == "image-text" and not any(prompt.more for prompt in prompts):
        return "texts only, without images"
    return "texts only, without audio" if kind in ("speech", "seq2seq") else ""


def _with_sources(model: Any) -> list[Prompt]:
    start = model.generation_config.decoder_start_token_id
    start = model.generation_config.bos_token_id if start is None else start
    if start is None:
        raise ValueError("its configuration does not say which token texts start with")
    prompts = []
    for row, begin in enumerate(BEGINNINGS):
        arguments, given = _source(model, row)
        decoder = [start, *begin]
        given |= {"decoder_prompt": decoder if begin else None}
        prompts.append(Prompt(given, decoder, "decoder_input_ids", arguments))
    return prompts


def _source(model: Any, row: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What the encoder reads, as arguments of the model and as a part of a prompt."""
    if model.main_input_name != FEATURES:
        ids = torch.tensor([TEXTS[row]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, {
            "encoder_prompt": TEXTS[row]
        }
    heard = features(model, row)
    return {FEATURES: heard[None].to(model.dtype)}, {
        "multi_modal_data": {"audio": {FEATURES: heard}}
    }


def features(model: Any, seed: int) -> Tensor:
    """Returns what a model like Whisper hears, ``[M, F]``."""
    config, numbers = model.config, torch.Generator().manual_seed(seed)
    return torch.randn(
        config.num_mel_bins, 2 * config.max_source_positions, generator=numbers
    ).double()


def _with_images(
    model: Any, placeholder: int, images: Mapping[str, Tensor], size: int
) -> list[Prompt]:
    marks = placeholders(model.config)
    known = inspect.signature(model.forward).parameters
    text = model.config.get_text_config()
    both_ways = getattr(text, "use_bidirectional_attention", None) is True
    prompts = []
    for prompt in ILLUSTRATED:
        ids: list[int] = []
        for token in prompt:
            ids += [placeholder] * size if token == IMAGE else [_other_than(marks, token)]
        more: dict[str, Tensor] = {}
        if IMAGE in prompt:
            # In a prompt that is read both ways every token is of the kind that sees all others.
            types = torch.tensor([[int(token == placeholder) for token in ids]])
            types *= int(not both_ways)
            more = {**images, **{name: types for name in _TYPES if name in known}}
        given = {"input_ids": torch.tensor([ids]), **more} if more else list(ids)
        prompts.append(Prompt(given, ids, more=more))
    return prompts


def _other_than(marks: frozenset[int], token: int) -> int:
    """The first token from this one on that does not stand for an image."""
    return next(other for other in count(token) if other not in marks)


def placeholders(config: Any) -> frozenset[int]:
    """Returns the tokens that stand for media."""
    found = (getattr(config, name, None) for name in _PLACES)
    return frozenset(token for token in found if isinstance(token, int))


def _placeholder(config: Any) -> int | None:
    """The token that stands for an image, if the configuration says."""
    found = (getattr(config, name, None) for name in _PLACES[:2])
    return next((token for token in found if isinstance(token, int)), None)
