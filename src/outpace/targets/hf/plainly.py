"""A text in one pass of a model, without a cache: what drafts and slots are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


@torch.inference_mode()
def read_plainly(model: nn.Module, ids: Sequence[int], **arguments: Tensor) -> Tensor:
    """Returns ``[T, V]``: the logits after each token of the text.

    arguments: further ones of the model, such as ``position_ids`` ``[1, T]``.
    """
    loaded: Any = model
    tokens = torch.tensor([list(ids)], device=loaded.device)
    logits: Tensor = model(input_ids=tokens, use_cache=False, **arguments).logits
    return logits[0]


def some_tokens(model: nn.Module, count: int, first: int = 3) -> list[int]:
    """Returns a text of ``count`` token ids, neighbours different."""
    loaded: Any = model
    size = loaded.config.get_text_config().vocab_size
    return [(first + 7 * index) % size for index in range(count)]
