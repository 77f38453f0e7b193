"""A transformers target without some of its sub-layers, over the target's own weights and slots."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from outpace.targets.base import SubLayers, View
from outpace.targets.hf.layers import skipping
from outpace.targets.hf.runner import Runner


class LayerSkippingView(View):
    """Runs the target's model with parts of its layers left out.

    The layers that do run see what the whole target has cached.
    """

    def __init__(self, runner: Runner, ready: Callable[[], int], skipped: SubLayers) -> None:
        """runner: the target's. ready: tells how many of its rows take part in passes."""
        self._target, self._ready, self._skipped = runner, ready, skipped
        self._fed = 0

    def begin(self) -> None:
        self._fed = 0

    def forward(self, tokens: Tensor) -> Tensor:
        runner, rows = self._target, self._ready()
        cached = runner.lengths
        try:
            runner.lengths = [length + self._fed for length in cached]
            with skipping(runner.model, self._skipped):
                output = runner.forward(tokens[:rows], keep=tokens.shape[1], eager=True)
        finally:
            runner.lengths = cached
        self._fed += tokens.shape[1]
        logits: Tensor = output.logits[:, -tokens.shape[1] :]
        return logits
