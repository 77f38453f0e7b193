"""Why drafts cannot be scored with a model: the first thing that a round needs and it lacks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from outpace.targets.hf.attention import to_attention_mask
from outpace.targets.hf.kinds import GROUPED, lack_float64
from outpace.targets.hf.plain import dummy_tokens, forward_uncached
from outpace.targets.hf.recurrent.families import attends

_SHORT = 6


def why_it_fails(model: nn.Module, error: Exception) -> str:
    """Returns the first of the things that a round needs at which the model raises an error.

    error: the one that it has raised in a round.
    """
    if "view size is not compatible" in str(error):
        return "it reads the keys of several rows only where they lie one after the other"
    ids, positions, mask = dummy_tokens(model, _SHORT), _positions(model), _causal(model)
    needed: tuple[tuple[dict[str, Tensor], str], ...] = (
        ({}, _unread_alone(model)),
        ({"position_ids": positions}, "it takes no position_ids, which place drafted tokens"),
        (
            {"position_ids": positions, "attention_mask": mask},
            "it takes no attention mask with a row for each token, which drafted tokens need",
        ),
    )
    for arguments, reason in needed:
        try:
            forward_uncached(model, ids, **arguments)
        except Exception:  # the error that matters is the one that the caller has seen
            return reason
    if attends(model.config):
        hidden = forward_uncached(model, ids, attention_mask=_causal(model, hidden=1))
        if torch.equal(hidden, forward_uncached(model, ids)):
            return "it ignores a mask with a row for each token, which drafted tokens need"
    return "it does not work with a cache that is handed to it, but keeps one of another kind"


def _unread_alone(model: nn.Module) -> str:
    """Returns why a model cannot read a text of token ids."""
    config: Any = model.config
    if lack_float64(model):
        return f"its experts are computed by {GROUPED!r}, which takes no float64"
    codebooks = getattr(config, "num_codebooks", 1)
    if codebooks > 1:
        return f"it reads {codebooks} codes of audio at once, where outpace gives it one token"
    for part, medium in (("vision_config", "an image"), ("audio_config", "audio")):
        if getattr(config, part, None) is not None:
            return (
                f"it reads no text without {medium}, and outpace tries models out with plain texts"
            )
    return "it cannot read a text of token ids alone (it needs another input or a setting)"


def remedy_for(model: nn.Module) -> str:
    """Returns what to do about a model that cannot be decoded speculatively."""
    if lack_float64(model):
        return "Load it with experts_implementation='eager', or in float32"
    return "Use another model"


def why_other_logits(model: nn.Module) -> str:
    """Returns which of the things that place drafted tokens the model ignores."""
    ids, positions = dummy_tokens(model, _SHORT), _positions(model)
    plain = forward_uncached(model, ids)
    if torch.equal(forward_uncached(model, ids, attention_mask=_causal(model, hidden=1)), plain):
        return "it ignores the attention mask that it is given"
    if not torch.allclose(forward_uncached(model, ids, position_ids=positions), plain):
        return "it does not count the positions of a text from 0"
    if torch.equal(forward_uncached(model, ids, position_ids=positions * 2), plain):
        return "it ignores the position_ids that it is given"
    return "it reads drafted tokens after cached ones otherwise than the same tokens in a text"


def _positions(model: nn.Module) -> Tensor:
    """Returns ``[1, T]``: the positions of a text."""
    loaded: Any = model
    return torch.arange(_SHORT, device=loaded.device)[None]


def _causal(model: nn.Module, hidden: int = 0) -> Tensor:
    """Returns the mask ``[1, 1, T, T]`` of a text; its last token does not see the first
    ``hidden`` ones."""
    loaded: Any = model
    seen = torch.ones(1, _SHORT, _SHORT, dtype=torch.bool, device=loaded.device).tril()
    seen[:, -1, :hidden] = False
    return to_attention_mask(
        seen, loaded.config.get_text_config()._attn_implementation, loaded.dtype
    )
