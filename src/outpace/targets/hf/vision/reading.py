"""What a model makes of a prompt with images, for the language model inside it.

A vision-language model turns images into embeddings, puts them in the place of placeholder tokens,
and works out the positions and masks that belong to them. All of this it does itself, in one pass
over the prompt that is stopped where its language model would begin. What the language model would
have been given is then fed to it piece by piece, over our slots, and in as many passes as it takes.
So nothing here knows one family from another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from outpace.errors import PromptError, UnsupportedModel, reason_of
from outpace.targets.hf.turns import TURNS
from outpace.targets.hf.vision.prompt import ImagePrompt
from outpace.targets.hf.vision.tokens import placeholders


@torch.inference_mode()
def read_prompt(
    model: nn.Module, token_ids: Sequence[int], media: Mapping[str, Any]
) -> ImagePrompt:
    """Returns what the language model of ``model`` is given for a prompt with images.

    token_ids: with as many placeholders as the images need. media: what the processor made of the
    images, by the names of the model's arguments. Raises ``PromptError`` where the two do not fit
    together, and ``UnsupportedModel`` for a model that gives its language model more than that.
    """
    loaded: Any = model
    if token_ids[-1] in placeholders(loaded.config):
        raise PromptError("the prompt ends with an image: put some text behind it.")
    ids = torch.tensor([list(token_ids)], device=loaded.device)
    try:
        with _as_it_was(loaded):
            given = _given_to_decoder(loaded, input_ids=ids, **on_device(loaded, media))
    except (torch.OutOfMemoryError, UnsupportedModel):
        raise
    except Exception as error:  # of the model's own code, over inputs that are not as it expects
        raise PromptError(
            f"{type(model).__name__} cannot read the images of this prompt ({reason_of(error)}): "
            "give text and images through its processor."
        ) from error
    return ImagePrompt.of(loaded, len(token_ids), given)


@torch.inference_mode()
def text_offset(model: nn.Module) -> int:
    """Returns the position of a text's first token: 1 for PaliGemma, 0 for all others."""
    loaded: Any = model
    if not placeholders(loaded.config):
        return 0
    ids = torch.zeros(1, 1, dtype=torch.long, device=loaded.device)
    with _as_it_was(loaded):
        positions = _given_to_decoder(loaded, input_ids=ids).get("position_ids")
    return 0 if positions is None else int(positions.max())


class _Reached(Exception):
    """The pass has come to the language model."""


def _given_to_decoder(model: Any, **inputs: Any) -> dict[str, Any]:
    """Returns the arguments that a model's forward calls its language model with."""
    given: dict[str, Any] = {}

    def note(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if args:
            raise UnsupportedModel(
                f"{type(model).__name__} hands its language model arguments without names: images "
                "cannot be read for it."
            )
        given.update(options)
        raise _Reached

    hook = model.get_decoder().register_forward_pre_hook(note, with_kwargs=True)
    try:
        model(use_cache=False, **inputs)
    except _Reached:
        return given
    finally:
        hook.remove()
    raise UnsupportedModel(
        f"{type(model).__name__} does not keep its language model in one part: images cannot be "
        "read for it."
    )


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Gives a model back what it remembers of the last prompt that it was given by others. Nobody
    else computes with it meanwhile."""
    holders: list[Any] = [part for part in model.modules() if hasattr(part, "rope_deltas")]
    with TURNS.of(model):
        before = [holder.rope_deltas for holder in holders]
        try:
            yield
        finally:
            for holder, deltas in zip(holders, before, strict=True):
                holder.rope_deltas = deltas


def on_device(model: nn.Module, media: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a processor made of images as tensors where the model is."""
    return {name: _moved(value, model) for name, value in media.items()}


def _moved(value: Any, model: Any) -> Any:
    """Puts what a processor made where the model is; pixels become numbers of its kind."""
    if isinstance(value, Tensor):
        return value.to(model.device, model.dtype if value.is_floating_point() else value.dtype)
    if isinstance(value, (list, tuple)):
        return [_moved(item, model) for item in value]
    return value
