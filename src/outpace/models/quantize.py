"""Quantised weights: less memory to read, and a model of its own.

On a CPU, "int8": each output channel's weights as 8-bit integers of one scale, the products exact
integers by oneDNN. The activations must be integers too. Rounded to 8 bits they would not do here:
attention adds up in another order when several tokens share a pass, the last bit that this changes
decides now and then which way an activation is rounded, and one step of 1/127 is felt in the logits
(by a percent of their spread) where the last bit was not. Speculation would change the text.
So each row is split into two 8-bit halves of a scale of its own, 15 bits together, and both pass
through the product as rows of their own, at hardly more than the price of one: the weights are read
once. What is lost is then only what the weights lose.

On a GPU, "int8" and "int4": torchao's weight-only schemes.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal

import torch
from torch import Tensor, nn

from outpace.errors import ConfigError, UnsupportedModel, did_you_mean
from outpace.models.layers import linear_layers, matrix_of

Quantization = Literal["int8", "int4"]
QUANTIZATIONS = ("int8", "int4")

SMALLEST_SCALE = 1e-30
"""A row of zeros is divided by this instead of by zero."""


class Int8Linear(nn.Module):
    """A linear layer with 8-bit weights and activations of two 8-bit halves.

    A row's result has the same bits whatever rows it shares the product with: its scale is its own,
    the products are exact integers, and each operation around them rounds element by element. Only
    the packed weight is kept.
    """

    def __init__(self, layer: nn.Module, levels: int) -> None:
        super().__init__()
        matrix = matrix_of(layer)  # [N, K]
        self.out_features, self.in_features = matrix.shape
        self.levels = levels
        scale = matrix.abs().amax(1).clamp(min=SMALLEST_SCALE) / 127
        integers = (matrix / scale[:, None]).round().to(torch.int8)
        self.register_buffer("scale", scale)  # [N]
        self.register_buffer("zero", torch.zeros(len(scale), dtype=torch.int32))
        self.bias: Any = layer.bias
        self._packed = _pack(integers)
        self.packed_bytes = integers.nbytes + self.scale.nbytes + self.zero.nbytes

    scale: Tensor
    zero: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """x: ``[..., K]`` -> ``[..., N]``."""
        flat = x.reshape(-1, self.in_features)  # [R, K]
        rows, finer = len(flat), 2 * self.levels
        step = flat.abs().amax(-1, keepdim=True).clamp_min_(SMALLEST_SCALE).div_(self.levels)
        steps = flat / step
        high = steps.round()
        halves = torch.cat([high, (steps - high).mul_(finer)])  # [2 R, K], within the levels
        y = _product(halves, self._packed, self.scale, self.zero, self.levels)  # [2 R, N]
        y = y[:rows].add_(y[rows:].div_(finer)).mul_(step)
        if self.bias is not None:
            y = y.add_(self.bias)
        return y.view(*x.shape[:-1], -1)


def _pack(integers: Tensor) -> Tensor:
    # The number of rows is a hint.
    packed: Tensor = torch.ops.onednn.qlinear_prepack(integers, [16, integers.shape[1]])
    return packed


def _product(x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor, levels: int) -> Tensor:
    """x: ``[R, K]``, rounded to integers, times the weight's and its channels' scales, ``[R, N]``.

    Overwrites x.
    """
    middle = levels + 1  # what zero is as an unsigned byte, which is what the kernels take
    bytes_ = x.add_(middle + 0.5).to(torch.uint8)  # cutting off what follows the point rounds
    y: Tensor = torch.ops.onednn.qlinear_pointwise(
        bytes_, 1.0, middle, packed, scale, zero, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return y


def int8_levels() -> int:
    """Returns up to which integer activations are multiplied exactly here, 127 or 63; 0: none are.

    Without VNNI, pairs of products are added up in 16 bits, which full bytes overflow.
    """
    ones, zero = torch.ones(32), torch.zeros(32, dtype=torch.int32)
    try:
        packed = _pack(torch.full((32, 64), 127, dtype=torch.int8))
        for levels in (127, 63):
            x = torch.full((2, 64), float(levels))
            if bool((_product(x, packed, ones, zero, levels) == 127 * 64 * levels).all()):
                return levels
    except (RuntimeError, AttributeError):
        return 0
    return 0


def check(quantization: str | None, device: torch.device, dtype: torch.dtype | str) -> None:
    """Raises ``ConfigError`` where a model cannot be quantised so; asked before it is loaded."""
    if quantization is None:
        return
    if quantization not in QUANTIZATIONS:
        raise ConfigError(
            f"unknown quantization {quantization!r}{did_you_mean(quantization, QUANTIZATIONS)}."
        )
    if device.type == "cpu":
        _check_cpu(quantization, dtype)
    elif dtype in (torch.float32, torch.float64):
        raise ConfigError(
            f"quantization {quantization!r} on a GPU computes in 16 bits, not in "
            f"{str(dtype).removeprefix('torch.')}: use dtype 'bfloat16'."
        )
    else:
        _torchao()


def _check_cpu(quantization: str, dtype: torch.dtype | str) -> None:
    if quantization != "int8":
        raise ConfigError(
            f"quantization {quantization!r} is there on a GPU only: use 'int8' on a CPU."
        )
    if dtype != torch.float32:
        raise ConfigError(
            "quantization 'int8' on a CPU computes in float32, not in "
            f"{str(dtype).removeprefix('torch.')}: leave dtype out."
        )
    if int8_levels() == 0:
        raise ConfigError(
            "quantization 'int8' needs torch with oneDNN's integer products, which this processor "
            "or this build of torch lacks: leave quantization out."
        )


@torch.no_grad()
def quantize(model: nn.Module, quantization: Quantization) -> None:
    """Exchanges the linear layers of a model for quantised ones, in place.

    Embeddings stay; a head that is tied to one gets integers of its own. Raises
    ``UnsupportedModel`` where there is nothing to exchange.
    """
    layers = linear_layers(model)
    if not layers:
        raise UnsupportedModel(
            f"{type(model).__name__} has no plain linear layers to quantise: leave quantization "
            "out."
        )
    if next(model.parameters()).device.type != "cpu":
        return _by_torchao(model, quantization)
    levels = int8_levels()
    for parent, name in layers:
        setattr(parent, name, Int8Linear(getattr(parent, name), levels).eval())


def _by_torchao(model: nn.Module, quantization: Quantization) -> None:
    torchao = _torchao()
    schemes = {"int8": torchao.Int8WeightOnlyConfig, "int4": torchao.Int4WeightOnlyConfig}
    torchao.quantize_(model, schemes[quantization]())


def _torchao() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about its own kernels for other machines
            from torchao import quantization
    except ImportError as error:
        raise ConfigError(
            "quantization on a GPU needs torchao: pip install 'outpace[quant]'."
        ) from error
    return quantization
