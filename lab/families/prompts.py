"""What a model is given: token ids, a source for its encoder, or images between tokens.

The same prompt is given to transformers' ``generate`` and to outpace. Images are random, in the
form in which the processors of vision-language models hand them over."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lab.families.listing import Kind

SIDE = 16
"""Pixels of a side of a square image."""
PATCH = 4
"""Pixels of a side of a patch."""
COLOURS = 3
TALL, WIDE = 4, 6
"""Patches of an image that is not square."""

_OF_DTYPE = ("dtype", "Double", "overflow")

Pixels = dict[str, Tensor]


def pixels(*shape: int) -> Tensor:
    """Returns random numbers in float64, the same ones for the same shape."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def square(images: int, side: int = SIDE) -> Pixels:
    """Returns images of one size ``[images, C, S, S]``."""
    return {"pixel_values": pixels(images, COLOURS, side, side)}


def listed(images: int, side: int = SIDE) -> Pixels:
    """Returns the images of each prompt by themselves, ``[1, images, C, S, S]``."""
    return {"pixel_values": pixels(1, images, COLOURS, side, side)}


def masked(images: int, side: int = SIDE) -> Pixels:
    """Returns images with masks that show where they are not padded."""
    mask = torch.ones(images, side, side, dtype=torch.bool)
    return {**square(images, side), "pixel_mask": mask}


def sized(images: int, side: int = SIDE) -> Pixels:
    """Returns images with the height and width that they had before they were padded."""
    return {**square(images, side), "image_sizes": torch.tensor([[side, side]] * images)}


def tiled(images: int, side: int = SIDE) -> Pixels:
    """Returns images of two squares: one tile for the whole image, and two for its halves."""
    return {
        "pixel_values": pixels(images, 3, COLOURS, side, side),
        "image_sizes": torch.tensor([[side, 2 * side]] * images),
    }


def gridded(images: int, numbers: int = COLOURS * 2 * PATCH**2) -> Pixels:
    """Returns all patches ``[n, numbers]`` of images that are 4 patches high and 6 wide."""
    return {
        "pixel_values": pixels(images * TALL * WIDE, numbers),
        "image_grid_thw": torch.tensor([[1, TALL, WIDE]] * images),
    }


def shaped(images: int, numbers: int = COLOURS * PATCH**2) -> Pixels:
    """Returns patches ``[images, n, numbers]`` with the shapes of the images."""
    return {
        "pixel_values": pixels(images, TALL * WIDE, numbers),
        "spatial_shapes": torch.tensor([[TALL, WIDE]] * images),
        "pixel_attention_mask": torch.ones(images, TALL * WIDE, dtype=torch.long),
    }


def placed(images: int, numbers: int = COLOURS * PATCH**2) -> Pixels:
    """Returns patches ``[images, 16, numbers]`` with their places."""
    places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(-1)
    return {
        "pixel_values": pixels(images, 16, numbers).sigmoid(),
        "image_position_ids": places.repeat(images, 1, 1),
    }


def measured(images: int, numbers: int = COLOURS * PATCH**2) -> Pixels:
    """Returns all patches ``[n, numbers]`` with the height and width of each image in patches."""
    return {
        "pixel_values": pixels(images * TALL * WIDE, numbers),
        "image_grid_hw": torch.tensor([[TALL, WIDE]] * images),
    }


def cut(images: int, numbers: int = COLOURS * PATCH**2) -> Pixels:
    """Returns all patches as little images ``[n, C, P, P]``."""
    side = round((numbers // COLOURS) ** 0.5)
    whole = gridded(images, numbers)
    return {**whole, "pixel_values": whole["pixel_values"].view(-1, COLOURS, side, side)}


def merged(images: int, numbers: int = COLOURS * PATCH**2) -> Pixels:
    """Returns all patches ``[n, numbers]``, and into how many sides of patches they are merged."""
    return {**gridded(images, numbers), "image_merge_sizes": torch.tensor([2] * images)}


def strips(images: int, patch: int = PATCH) -> Pixels:
    """Returns the patches of all images beside each other ``[1, C, P, n * P]``, with the height and
    width of each image in patches. All are a multiple of 4 patches high and wide."""
    return {
        "pixel_values": pixels(1, COLOURS, patch, images * TALL * TALL * patch),
        "target_sizes": torch.tensor([[TALL, TALL]] * images, dtype=torch.int32),
    }


def slotted(images: int, side: int = SIDE) -> Pixels:
    """Returns the tiles of each prompt ``[images, 1, C, S, S]``, and which of them are there."""
    return {
        "pixel_values": pixels(images, 1, COLOURS, side, side),
        "pixel_attention_mask": torch.ones(images, 1, dtype=torch.bool),
    }


def seen(model: Any, images: int) -> tuple[Pixels, int] | None:
    """Returns images in the form that a model takes, and how many placeholders each of them needs;
    None where no form here is the model's.

    Forms are tried out on the model's own ``get_image_features``, the most special first. Raises
    the model's error where it does not compute in its dtype.
    """
    features = getattr(model, "get_image_features", None)
    features = features or getattr(model.base_model, "get_image_features", None)
    if features is None:
        return None
    failed: Exception | None = None
    for made in _forms(model, images):
        try:
            return made, _count(features, made, model.dtype) // images
        except Exception as error:  # of the model's own code, over a form that is not its own
            failed = failed or error
    if failed is not None and concerns_dtype(failed):
        raise failed
    return None


def concerns_dtype(error: Exception) -> bool:
    """Returns whether an error says that a model does not compute in the dtype that it is in."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _OF_DTYPE)


def _forms(model: Any, images: int) -> Iterator[Pixels]:
    """Yields images in the forms of which a model's forward knows all names."""
    vision: Any = getattr(model.config, "vision_config", None)
    side = _number(vision, "image_size", SIDE)
    patch = _number(vision, "patch_size", PATCH)
    numbers = COLOURS * patch**2
    frames = _number(vision, "temporal_patch_size", _number(vision, "patch_temporal", 1))
    ways: Mapping[Callable[..., Pixels], int] = {
        merged: numbers,
        gridded: numbers * frames,
        cut: numbers,
        measured: numbers,
        strips: patch,
        placed: numbers,
        shaped: numbers,
        slotted: side,
        square: side,
        masked: side,
        tiled: side,
        sized: side,
        listed: side,
    }
    known = inspect.signature(model.forward).parameters
    for make, size in ways.items():
        made = make(images, size)
        if made.keys() <= known.keys():
            yield made


def _number(config: Any, name: str, default: int) -> int:
    found = getattr(config, name, None) or default
    return int(found[0] if isinstance(found, (list, tuple)) else found)


@torch.inference_mode()
def _count(features: Callable[..., Any], made: Pixels, dtype: torch.dtype) -> int:
    """Returns how many embeddings a model makes of images."""
    options = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in made.items()
    }
    output = features(**options)
    found = getattr(output, "pooler_output", output)
    found = output.last_hidden_state if found is None else found
    parts = [found] if isinstance(found, Tensor) else list(found)
    return sum(part.numel() // part.shape[-1] for part in parts)


# -- prompts -----------------------------------------------------------------------------------


TEXTS = ([5, 6, 7, 8, 9], [1], [2, 3] * 6)
"""Ragged: shorter than every window, one token, longer than every window."""
BEGINNINGS: Sequence[Sequence[int]] = ((), (4, 5, 6, 7), (9,))
"""What the decoders of the three rows begin with, after the token that all texts start with."""
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
    """After which the text is written."""
    name: str = "input_ids"
    """The argument that has these."""
    more: Mapping[str, Tensor] = field(default_factory=dict)
    """Further arguments."""

    def arguments(self, device: torch.device, text: Sequence[int] = ()) -> dict[str, Any]:
        """Returns the arguments of a pass over the prompt and a text after it."""
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
