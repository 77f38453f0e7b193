"""Parts of a causal LM that stand for the whole in a pass: without some sub-layers, only its first
layers, or only the others; and views of a target through them.

They share the model's weights. Where outpace's own code computes the model
(`cpu.native_layers.model`), it computes its parts too; elsewhere the model's modules are exchanged
while the pass runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from outpace.core.proposal import Precomputed
from outpace.errors import UnsupportedModel
from outpace.targets.base import NO_SUBLAYERS, EarlyExitView, PartialView, SubLayers
from outpace.targets.cpu.native_layers.model import NativeModel, NativePart
from outpace.targets.hf.logits import PassOutput
from outpace.targets.hf.partial.layers import (
    StateInjection,
    capture_states,
    decoder_layers,
    inject_states,
    parts_of,
    skip_sublayers,
)
from outpace.targets.hf.plain import dummy_tokens, forward_uncached
from outpace.targets.hf.runner import Runner
from outpace.targets.hf.weights import pass_bytes


def try_without(model: nn.Module, skipped: SubLayers) -> None:
    """Raises ``UnsupportedModel`` for a model that does not run without some sub-layers, after a
    pass over a few tokens: what a part returns besides its numbers differs by model."""
    error: Exception | None = None
    try:
        with skip_sublayers(model, skipped):
            if forward_uncached(model, dummy_tokens(model, 2)).dim() == 2:
                return
    except (ValueError, TypeError, IndexError, AttributeError, RuntimeError) as raised:
        error = raised
    raise UnsupportedModel(
        f"{type(model).__name__} does not run without these parts of its layers "
        f"({error or 'they return more than their states'}): leave out whole layers, or only the "
        "other kind of part."
    ) from error


class WithoutSubLayers:
    """A model without some parts of its layers: these add nothing to the residual stream."""

    def __init__(self, model: nn.Module, skipped: SubLayers) -> None:
        """Raises ``UnsupportedModel`` where the parts cannot be found or left out."""
        self._model, self._skipped = model, skipped
        self._native = _native_part(model, skipped=skipped)
        self.pass_bytes = pass_bytes(model) - _bytes_of(model, skipped)
        try_without(model, skipped)

    def __call__(self, **options: Any) -> Any:
        """Takes and returns what the model does."""
        if self._native is not None and self._native.takes(**options):
            return PassOutput(self._native.logits(**options))
        with skip_sublayers(self._model, self._skipped):
            return self._model(**options)


class LowerLayers:
    """The first layers of a model, with its norm and head after them."""

    def __init__(self, model: nn.Module, count: int, stops: bool = False) -> None:
        """count: of layers, at least 1 and fewer than the model has. stops: neither norm nor head
        are computed; the logits are then ``[A, keep, 0]``."""
        whole = len(decoder_layers(model))
        if not 0 < count < whole:
            raise UnsupportedModel(
                f"a model of {whole} layers cannot be left after {count}: choose 1 to {whole - 1}."
            )
        self._model, self.count = model, count
        self._others = SubLayers.of_layers(range(count, whole))
        if not stops:
            try_without(model, self._others)
        self._native = _native_part(model, last=count)
        self.pass_bytes = pass_bytes(model) - _bytes_of(model, self._others)
        self.states: Tensor
        """``[A, T, H]``: what the layers made of the last pass."""
        self._stops = stops

    def __call__(self, **options: Any) -> Any:
        """Takes what the model does; returns the logits after these layers."""
        if self._native is not None and self._native.takes(**options):
            self.states = self._native.states(**options)
            keep = options["logits_to_keep"]
            if self._stops:
                return self._no_logits(keep)
            return PassOutput(self._native.head(self.states[:, -keep:]))
        seen: list[Tensor] = []
        output: Any = None
        with (
            skip_sublayers(self._model, self._others),
            capture_states(self._model, self.count, seen, stop=self._stops),
        ):
            output = self._model(**options)
        (self.states,) = seen
        return self._no_logits(options["logits_to_keep"]) if output is None else output

    def _no_logits(self, keep: int) -> PassOutput:
        return PassOutput(self.states.new_empty(self.states.shape[0], keep, 0))


class UpperLayers:
    """The layers after the first ones, up to the logits."""

    def __init__(self, model: nn.Module, count: int) -> None:
        """count: of layers that are not these."""
        self._model, self._count = model, count
        self._others = SubLayers.of_layers(range(count))
        self._native = _native_part(model, first=count)

    def __call__(self, states: Tensor, **options: Any) -> Any:
        """Takes what the model does, and what `LowerLayers` made of its tokens, ``[A, T, H]``."""
        if self._native is not None and self._native.takes(**options):
            return PassOutput(self._native.logits(states=states, **options))
        joining = StateInjection.of(self._count, states)
        with skip_sublayers(self._model, self._others), inject_states(self._model, joining):
            return self._model(**options)


def _native_part(
    model: Any, first: int = 0, last: int | None = None, skipped: SubLayers = NO_SUBLAYERS
) -> NativePart | None:
    """The same layers in outpace's own code, where that computes the model."""
    whole = model.__dict__.get("forward")
    return whole.part(first, last, skipped) if isinstance(whole, NativeModel) else None


def _bytes_of(model: nn.Module, skipped: SubLayers) -> int:
    """Bytes of weights that a pass without these parts does not read."""
    layers, wholes = decoder_layers(model), skipped.complete_layers
    partly = SubLayers(skipped.attention - wholes, skipped.mlp - wholes)
    left_out = [*(layers[number] for number in wholes), *parts_of(model, partly)]
    return sum(map(pass_bytes, left_out))


# -- views of a target, over its own slots ---------------------------------------------------------


class PartView(PartialView):
    """Runs a part of the target's model.

    The layers that do run see what the whole target has cached.
    """

    def __init__(
        self, runner: Runner, ready: Callable[[], int], part: WithoutSubLayers | LowerLayers
    ) -> None:
        """runner: the target's. ready: returns how many of its rows take part in passes."""
        self._target, self._ready, self._part = runner, ready, part
        self.pass_bytes = part.pass_bytes
        self._fed = 0

    def begin(self) -> None:
        self._fed = 0

    def forward(self, tokens: Tensor, keep: int | None = None) -> Tensor:
        runner, rows = self._target, self._ready()
        logits: Tensor = pass_after(
            runner, self._fed, tokens[:rows], keep or tokens.shape[1], self._part
        ).logits
        self._fed += tokens.shape[1]
        return logits


class LowerLayersView(PartView, EarlyExitView):
    """The first layers, which keep what they made of the tokens."""

    def __init__(self, runner: Runner, ready: Callable[[], int], lower: LowerLayers) -> None:
        super().__init__(runner, ready, lower)
        self._lower = lower
        self._states: list[Tensor] = []  # [B, T, H] of each pass

    def begin(self) -> None:
        super().begin()
        self._states = []

    def forward(self, tokens: Tensor, keep: int | None = None) -> Tensor:
        logits = super().forward(tokens, keep)
        self._states.append(self._lower.states)
        return logits

    @property
    def precomputed(self) -> Precomputed:
        return Precomputed(self._lower.count, torch.cat(self._states, 1))


def pass_after(
    runner: Runner, fed: int, tokens: Tensor, keep: int, part: Callable[..., Any]
) -> Any:
    """Returns what a part of the model makes of tokens ``[A, T]`` that follow ``fed`` others after
    what is cached. Nothing is committed, and any of it may be."""
    cached = runner.lengths
    try:
        runner.lengths = [length + fed for length in cached]
        return runner.forward(tokens, keep=keep, through=part, num_committed=0)
    finally:
        runner.lengths = cached
