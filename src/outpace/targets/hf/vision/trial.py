"""Whether a model reads a prompt with images over our slots as it does by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outpace.errors import UnsupportedModel
from outpace.targets.hf.runner import Runner
from outpace.targets.hf.supported.comparing import distance
from outpace.targets.hf.supported.support import tolerance
from outpace.targets.hf.turns import TURNS
from outpace.targets.hf.vision.feeding import feed
from outpace.targets.hf.vision.reading import on_device, read_prompt


@torch.inference_mode()
def try_images(model: nn.Module, token_ids: Sequence[int], media: Mapping[str, Any]) -> None:
    """Raises ``UnsupportedModel`` unless the token behind this prompt has the same logits when it
    is read in pieces over slots as in one plain pass of the model.

    Takes two passes over the prompt. Raises ``PromptError`` as `read_prompt` does.
    """
    pieces = _in_pieces(model, token_ids, media)
    ids = torch.tensor([list(token_ids)], device=pieces.device)
    loaded: Any = model
    with TURNS.of(model):
        output = loaded(input_ids=ids, use_cache=False, **on_device(model, media))
    whole = output.logits[0, -1].double()
    if distance(pieces, whole) > tolerance(model):
        raise UnsupportedModel(
            f"{type(model).__name__} reads a prompt with images otherwise in pieces than as a "
            "whole: give prompts without images, or use another model."
        )


def _in_pieces(model: nn.Module, token_ids: Sequence[int], media: Mapping[str, Any]) -> Tensor:
    """Returns the logits ``[V]`` behind a prompt, the last token of which is fed by itself."""
    prompt = read_prompt(model, token_ids, media)
    runner, last = Runner(model, rows=1, max_length=len(token_ids) + 1), len(token_ids) - 1
    runner.admit(1)
    feed(runner, 0, prompt, token_ids, last)
    ids = torch.tensor([[token_ids[-1]]], device=runner.device)
    return runner.forward(ids, keep=1).logits[0, -1].double()
