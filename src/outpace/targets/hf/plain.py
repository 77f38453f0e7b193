"""A text in one pass of a model, without a cache: what drafts and slots are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from outpace.targets.hf.attention import sdpa_backends_for, to_attention_mask
from outpace.targets.hf.kinds import is_encoder_decoder, placeholders
from outpace.targets.hf.lock import model_lock

_SOURCE = 4
"""How many states the source has that a decoder is given where any source will do."""


@torch.inference_mode()
def forward_uncached(model: nn.Module, ids: Sequence[int], **arguments: Any) -> Tensor:
    """Returns ``[T, V]``: the logits after each token of the text.

    arguments: further ones of the model, such as ``position_ids`` ``[1, T]``.
    """
    loaded: Any = model
    tokens = torch.tensor([list(ids)], device=loaded.device)
    arguments = {**forward_mask(model, len(ids)), **arguments}
    with model_lock(model), sdpa_backends_for(loaded.device):
        logits: Tensor = model(**of_texts(model, tokens), use_cache=False, **arguments).logits
    return logits[0]


def of_texts(model: nn.Module, tokens: Tensor) -> dict[str, Any]:
    """Returns how a model is given texts ``[B, T]``: an encoder-decoder has them written by its
    decoder, from some source."""
    if not is_encoder_decoder(model):
        return {"input_ids": tokens}
    states = dummy_states(model, _SOURCE).expand(len(tokens), -1, -1)
    source = BaseModelOutput(last_hidden_state=states)
    return {"decoder_input_ids": tokens, "encoder_outputs": source}


def is_causal_by_default(model: nn.Module) -> bool:
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
    if is_causal_by_default(model):
        return {}
    loaded: Any = model
    seen = torch.ones(1, length, length, dtype=torch.bool, device=loaded.device).tril()
    implementation = loaded.config.get_text_config()._attn_implementation
    return {"attention_mask": to_attention_mask(seen, implementation, loaded.dtype)}


def quantizes_inputs(model: nn.Module) -> bool:
    """Returns whether the model's passes are our own code's, and round what they multiply: then a
    pass by transformers' code has somewhat other logits."""
    return bool(getattr(model.forward, "quantizes_inputs", False))


def dummy_tokens(model: nn.Module, count: int, first: int = 3) -> list[int]:
    """Returns a text of ``count`` token ids, neighbours different."""
    loaded: Any = model
    size = loaded.config.get_text_config().vocab_size
    return [(first + 7 * index) % size for index in range(count)]


def dummy_states(model: nn.Module, count: int, seed: int = 0) -> Tensor:
    """Returns ``[count, H]``, what an encoder might have made of a source: drawn numbers."""
    loaded: Any = model
    encoder = getattr(loaded.config, "encoder", None)
    width = int((loaded.config if encoder is None else encoder).hidden_size)
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=numbers).to(loaded.device, loaded.dtype)
