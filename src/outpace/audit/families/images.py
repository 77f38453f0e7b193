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


def seen(model: Any, images: int) -> tuple[Pixels, int]:
    """Returns images in the form that a model takes, and how many placeholders each of them needs.

    Forms are tried out on the model's own ``get_image_features``, the most special first. Raises
    what that raises for the first where none will do.
    """
    failed: Exception | None = None
    for made in _forms(model, images):
        try:
            return made, _features(model, made) // images
        except Exception as error:  # of the model's own code, over a form that is not its own
            failed = failed or error
    raise failed or TypeError(f"{type(model).__name__} takes images in a form of its own")


def _forms(model: Any, images: int) -> Iterator[Pixels]:
    """Yields images in the forms of which a model's forward knows all names."""
    vision: Any = model.config.vision_config
    side = _number(vision, "image_size", SIDE)
    patch = COLOURS * _number(vision, "patch_size", PATCH) ** 2
    frames = _number(vision, "temporal_patch_size", 1)
    ways: Mapping[Callable[..., Pixels], int] = {
        gridded: patch * frames,
        placed: patch,
        shaped: patch,
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
def _features(model: Any, made: Pixels) -> int:
    """Returns how many embeddings a model makes of images."""
    options = {
        name: value.to(model.dtype) if value.is_floating_point() else value
        for name, value in made.items()
    }
    output = model.get_image_features(**options)
    found = getattr(output, "pooler_output", output)
    parts = [found] if isinstance(found, Tensor) else list(found)
    return sum(part.numel() // part.shape[-1] for part in parts)
