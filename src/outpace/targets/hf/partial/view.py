"""A transformers target without some of its layers, over the target's own weights and slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from outpace.core.proposal import Precomputed
from outpace.targets.base import LowerView, View
from outpace.targets.hf.partial.parts import LowerLayers, WithoutSubLayers
from outpace.targets.hf.runner import Runner


class PartView(View):
    """Runs a part of the target's model.

    The layers that do run see what the whole target has cached.
    """

    def __init__(
        self, runner: Runner, ready: Callable[[], int], part: WithoutSubLayers | LowerLayers
    ) -> None:
        """runner: the target's. ready: tells how many of its rows take part in passes."""
        self._target, self._ready, self._part = runner, ready, part
        self.pass_bytes = part.pass_bytes
        self._fed = 0

    def begin(self) -> None:
        self._fed = 0

    def forward(self, tokens: Tensor, keep: int | None = None) -> Tensor:
        runner, rows = self._target, self._ready()
        logits: Tensor = pass_behind(
            runner, self._fed, tokens[:rows], keep or tokens.shape[1], self._part
        ).logits
        self._fed += tokens.shape[1]
        return logits


class LowerLayersView(PartView, LowerView):
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


def pass_behind(
    runner: Runner, fed: int, tokens: Tensor, keep: int, part: Callable[..., Any]
) -> Any:
    """Returns what a part of the model makes of tokens ``[A, T]`` that follow ``fed`` others behind
    what is cached. Nothing is committed, and any of it may be."""
    cached = runner.lengths
    try:
        runner.lengths = [length + fed for length in cached]
        return runner.forward(tokens, keep=keep, through=part, certain=0)
    finally:
        runner.lengths = cached
