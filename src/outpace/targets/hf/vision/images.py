"""Prompts with images, as the rows of a runner read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outpace.core.transfer import to_device
from outpace.errors import UnsupportedModel
from outpace.targets.base import PromptInputs
from outpace.targets.hf.distance import distance
from outpace.targets.hf.kinds import placeholders
from outpace.targets.hf.lock import model_lock
from outpace.targets.hf.logits import PassOutput
from outpace.targets.hf.plain import is_causal_by_default
from outpace.targets.hf.runner import PREFILL_CHUNK, Runner
from outpace.targets.hf.trials import tolerance
from outpace.targets.hf.vision.prompt import ImagePrompt, on_device, read_prompt

IDENTICAL = frozenset(
    {
        "gemma3",
        "gemma4",
        "idefics3",
        "internvl",
        "llava",
        "llava_next",
        "llava_onevision",
        "mistral3",
        "paligemma",
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3_5",
        "qwen3_vl",
        "smolvlm",
    }
)
"""The families, by ``model_type``, whose prompts with images are known to be read as transformers
reads them: their texts are compared with those of ``generate`` in tests. What any other model makes
of images is tried with the first prompt that has some."""


class Images:
    """What one vision-language model makes of the images in prompts.

    Images are looked at when a row is admitted, and what the model makes of the prompt is read in
    pieces, one row after the other. From then on such a row is like any other, but that its
    positions may be other numbers than its tokens have.
    """

    def __init__(self, model: nn.Module) -> None:
        loaded: Any = model
        self._model = loaded
        self._placeholders = placeholders(loaded.config)
        self._tried = loaded.config.model_type in IDENTICAL
        self.is_causal_by_default = is_causal_by_default(model)
        """Whether prompts are read from left to right. Else no single pass over prompt and text
        gives the distributions of both."""

    def look(self, inputs: PromptInputs) -> ImagePrompt | None:
        """Returns what the model makes of a prompt with images, None for one without.

        Raises ``PromptError`` or ``UnsupportedModel`` where it cannot read the prompt.
        """
        if inputs.media is None:
            if self.is_causal_by_default:
                return None
            raise UnsupportedModel(
                f"{type(self._model).__name__} reads prompts both ways, and nothing says where "
                "this one ends: generate with LLM."
            )
        shown = inputs.token_ids[: inputs.media.tokens]
        if not self._tried:
            try_images(self._model, shown, inputs.media.inputs)
            self._tried = True
        return read_prompt(self._model, shown, inputs.media.inputs)

    def shown_in(self, text: Sequence[int]) -> bool:
        """Whether a text has placeholders: another one with the same may show other images."""
        return not self._placeholders.isdisjoint(text)


def feed(
    runner: Runner, row: int, prompt: ImagePrompt, token_ids: Sequence[int], needed: int
) -> None:
    """Caches the first ``needed`` tokens of a prompt with images, from where the row ends, and
    commits them. Tokens that are read with them, because they see each other, do not count.

    token_ids: of the prompt, at least those that are needed.
    """
    runner.offsets[row] = prompt.offset
    while runner.lengths[row] < needed:
        feed_piece(runner, row, prompt, token_ids, needed, PREFILL_CHUNK)


def feed_piece(
    runner: Runner,
    row: int,
    prompt: ImagePrompt,
    token_ids: Sequence[int],
    needed: int,
    size: int,
    **options: Any,
) -> PassOutput:
    """Does that for the next piece, of at most ``size`` tokens where these can be parted; returns
    the pass's output. options: further arguments of the model."""
    begin = runner.lengths[row]
    end = prompt.end(begin, size, needed)
    ids = to_device([list(token_ids[begin:end])], runner.device)
    through = prompt.piece(begin, end)
    output = runner.forward(ids, keep=1, first=row, through=through, **options)
    runner.lengths[row] = min(end, needed)
    return output


# -- trying a model out ----------------------------------------------------------------------------


@torch.inference_mode()
def try_images(model: nn.Module, token_ids: Sequence[int], media: Mapping[str, Any]) -> None:
    """Raises ``UnsupportedModel`` unless the token after this prompt has the same logits when it
    is read in pieces over slots as in one plain pass of the model.

    Takes two passes over the prompt. Raises ``PromptError`` as `read_prompt` does.
    """
    pieces = _in_pieces(model, token_ids, media)
    ids = torch.tensor([list(token_ids)], device=pieces.device)
    loaded: Any = model
    with model_lock(model):
        output = loaded(input_ids=ids, use_cache=False, **on_device(model, media))
    whole = output.logits[0, -1].double()
    if distance(pieces, whole) > tolerance(model):
        raise UnsupportedModel(
            f"{type(model).__name__} reads a prompt with images otherwise in pieces than as a "
            "whole: give prompts without images, or use another model."
        )


def _in_pieces(model: nn.Module, token_ids: Sequence[int], media: Mapping[str, Any]) -> Tensor:
    """Returns the logits ``[V]`` after a prompt, the last token of which is fed by itself."""
    prompt = read_prompt(model, token_ids, media)
    runner, last = Runner(model, rows=1, max_length=len(token_ids) + 1), len(token_ids) - 1
    runner.admit(1)
    feed(runner, 0, prompt, token_ids, last)
    ids = torch.tensor([[token_ids[-1]]], device=runner.device)
    return runner.forward(ids, keep=1).logits[0, -1].double()
