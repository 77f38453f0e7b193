"""Quantisation-aware training.

A drafter on a CPU is read in 8 or 4 bits, and 4 bits cost it some of its acceptance. A network that
computes with rounded weights while it learns gets it back: its loss is that of what it will draft.
The gradient at the rounded weights moves the unrounded ones, as if rounding were not there (the
straight-through estimator; Jacob et al. 2018, 1712.05877, for integers).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from outpace.errors import ConfigError
from outpace.targets.cpu.weights.blocks import to_four_bits
from outpace.targets.cpu.weights.layers import linear_layers, matrix_of
from outpace.targets.cpu.weights.narrow import to_int8
from outpace.targets.cpu.weights.quantize import Quantization

REROUND_EVERY = 8
"""Steps after which rounding is done anew. Between them the difference that it made is kept: 4 bits
take about as long as a step does, and a few steps hardly change which way a weight goes."""


class QuantizedWeights:
    """The weights of a network as a CPU will read them, to be put in the place of its own.

    These are the weights of its linear layers, but for one that is the table of its embeddings
    too.
    """

    def __init__(self, network: nn.Module, quantization: Quantization | None) -> None:
        """quantization: how they are rounded; None: they stay as they are. Raises ``ConfigError``
        where there is nothing to round."""
        self._quantization = quantization
        self._layers: list[Any] = [] if quantization is None else _layers(network)
        if quantization is not None and not self._layers:
            raise ConfigError(
                f"a {type(network).__name__} has no linear layers to round: leave the drafter's "
                "quantization out."
            )
        self.differences: list[Tensor] = []
        """How the rounded weights differed from the network's own when they were last kept."""

    @contextmanager
    def quantized(self, anew: bool, keep: bool = True) -> Iterator[None]:
        """Within it the network computes with rounded weights, and its own get the gradients.
        anew: whether they are rounded as they are now, or differ from the network's own as they
        did when they were last kept. keep: whether these are."""
        found = self.differences
        if anew or not found:
            found = [
                _rounded(layer, self._quantization) - layer.weight.detach()
                for layer in self._layers
            ]
        if keep:
            self.differences = found
        own = [layer.weight.data for layer in self._layers]
        try:
            for layer, difference in zip(self._layers, found, strict=True):
                layer.weight.data = layer.weight.data + difference
            yield
        finally:
            for layer, weight in zip(self._layers, own, strict=True):
                layer.weight.data = weight


def _layers(network: nn.Module) -> list[Any]:
    """The linear layers with a weight of their own, each once."""
    tables = {id(m.weight) for m in network.modules() if isinstance(m, nn.Embedding)}
    layers: list[Any] = [getattr(parent, name) for parent, name in linear_layers(network)]
    return list({id(one.weight): one for one in layers if id(one.weight) not in tables}.values())


@torch.no_grad()
def _rounded(layer: Any, quantization: Quantization | None) -> Tensor:
    """A layer's weight as a CPU will read it."""
    matrix = matrix_of(layer)
    if quantization == "int4":
        found = to_four_bits(matrix.cpu()).dense()[:, : matrix.shape[1]].to(matrix)
    else:
        integers, scale = to_int8(matrix)
        found = integers * scale[:, None]
    return found.t() if type(layer) is Conv1D else found
