"""Makes the target or the runner that a model needs: a plain one, or one for images or sources."""

from __future__ import annotations

from typing import Any

from torch import nn

from outpace.errors import ConfigError
from outpace.targets.hf.fixed import FixedShapes
from outpace.targets.hf.invariant.target import InvariantTarget
from outpace.targets.hf.runner import Runner
from outpace.targets.hf.seq2seq.lengths import is_encoder_decoder
from outpace.targets.hf.seq2seq.runner import DecoderRunner
from outpace.targets.hf.seq2seq.target import Seq2SeqTarget
from outpace.targets.hf.target import HFTarget
from outpace.targets.hf.vision.target import VisionTarget
from outpace.targets.hf.vision.tokens import placeholders


def make_target(
    model: nn.Module,
    rows: int,
    max_length: int,
    fixed: FixedShapes | None = None,
    saved_texts: int = 0,
    saved_tokens: int | None = None,
    invariant: bool = False,
) -> HFTarget:
    """Returns the target of a model; see `HFTarget`. ``ConfigError`` for what it cannot do.

    invariant: a token's logits shall not depend on what else is in a pass (`InvariantTarget`).
    """
    loaded: Any = model
    shows = not is_encoder_decoder(model) and bool(placeholders(loaded.config))
    if invariant and (shows or is_encoder_decoder(model)):
        raise ConfigError(
            f"{type(model).__name__} reads more than tokens, which passes of one shape cannot: "
            "leave batch_invariant out."
        )
    if not is_encoder_decoder(model):
        if invariant:
            return InvariantTarget(model, rows, max_length, fixed, saved_texts, saved_tokens)
        kind = VisionTarget if shows else HFTarget
        return kind(model, rows, max_length, fixed, saved_texts, saved_tokens)
    if saved_texts:
        raise ConfigError(
            f"{type(model).__name__} is an encoder-decoder, whose texts begin alike only where "
            "their sources are the same: leave enable_prefix_caching out."
        )
    return Seq2SeqTarget(model, rows, max_length, fixed)


def make_runner(
    model: nn.Module, rows: int, max_length: int, fixed: FixedShapes | None = None
) -> Runner:
    """Returns what runs a model that drafts; see `Runner`."""
    if not is_encoder_decoder(model):
        return Runner(model, rows, max_length, fixed)
    return DecoderRunner(model, rows, max_length, fixed)
