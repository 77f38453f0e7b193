"""Random images, as the processors of vision-language models hand them over."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

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
