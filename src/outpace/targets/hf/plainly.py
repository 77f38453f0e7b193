"""A text in one pass of a model, without a cache: what drafts and slots are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outpace.targets.hf.attended import as_attended
from outpace.targets.hf.vision.tokens import placeholders


@torch.inference_mode()
def read_plainly(model: nn.Module, ids: Sequence[int], **arguments: Tensor) -> Tensor:
    """Returns ``[T, V]``: the logits after each token of the text.

    arguments: further ones of the model, such as ``position_ids`` ``[1, T]``.
    """
    loaded: Any = model
    tokens = torch.tensor([list(ids)], device=loaded.device)
    arguments = {**forward_mask(model, len(ids)), **arguments}
    logits: Tensor = model(input_ids=tokens, use_cache=False, **arguments).logits
    return logits[0]


def reads_forward(model: nn.Module) -> bool:
    """Returns whether a text is read from left to right where no mask says so. Without a mask
    PaliGemma's language model reads it both ways, as it does prompts; what it writes it reads from
    left to right. Of a model of text alone this is not asked: such a one writes nothing."""
    loaded: Any = model
    if not placeholders(loaded.config):
        return True
    parts = loaded.get_decoder().modules()
    return all(getattr(part, "is_causal", True) is not False for part in parts)


def forward_mask(model: nn.Module, length: int) -> dict[str, Tensor]:
    """Returns the ``attention_mask`` argument with which a text is read from left to right; nothing
    for a model that needs none."""
    if reads_forward(model):
        return {}
    loaded: Any = model
    seen = torch.ones(1, length, length, dtype=torch.bool, device=loaded.device).tril()
    implementation = loaded.config.get_text_config()._attn_implementation
    return {"attention_mask": as_attended(seen, implementation, loaded.dtype)}


def some_tokens(model: nn.Module, count: int, first: int = 3) -> list[int]:
    """Returns a text of ``count`` token ids, neighbours different."""
    loaded: Any = model
    size = loaded.config.get_text_config().vocab_size
    return [(first + 7 * index) % size for index in range(count)]
