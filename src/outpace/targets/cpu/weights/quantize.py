"""Quantised weights: less memory to read per pass, and a model that differs a little from the
original.

On a CPU, "int8" and "int4" hold blocks of 32 weights as integers of 8 or 4 bits with a scale (and
in 4 bits a smallest value), and multiply them as integers with activations rounded to 8 bits
(`targets.cpu.native_layers.blocks`). That is for models all of whose passes are our own code's,
because only there the same token always meets the same roundings. Other models, and heads, have
8-bit weights with one scale for each output: our own products (`targets.cpu.native`) dequantise
them in registers, and activations stay float32.

Without a C++ compiler the products are oneDNN's. They multiply integers exactly, so the activations
must be integers too (`Int8Linear`). Eight bits would not do: attention adds up in another order
when several tokens share a pass, the last bit of an activation changes with that, now and then this
decides which way the activation is rounded, and one step of 1/127 moves the logits by a percent of
their spread. Speculation would change the text. So each row of activations is split into two 8-bit
halves, 15 bits together. Both pass through the product as rows of their own, which costs hardly
more than one row because the weights are read once.

On a GPU, "int8" and "int4": torchao's weight-only schemes.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from outpace.errors import ConfigError, UnsupportedModel, did_you_mean
from outpace.targets.cpu.linear import as_custom_op
from outpace.targets.cpu.native import Native, build, native
from outpace.targets.cpu.native_layers.blocks import NativeBlockLinear
from outpace.targets.cpu.native_layers.linear import NativeLinear, native_int8
from outpace.targets.cpu.native_layers.model import NativeModel
from outpace.targets.cpu.weights.blocks import BLOCK, in_blocks, to_four_bits
from outpace.targets.cpu.weights.layers import (
    PrepackedModule,
    linear_layers,
    matrix_of,
    replace_modules,
)
from outpace.targets.cpu.weights.narrow import SMALLEST_SCALE, to_int8

Quantization = Literal["int8", "int4"]
QUANTIZATIONS = ("int8", "int4")

EIGHT_BITS = 127
"""The largest code of 8 bits."""

WORTH = 1 << 18
"""Weights of a layer from which on 8 bits save time: smaller layers stay in the processor's
cache."""


class Int8Linear(PrepackedModule):
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
        integers, scale = to_int8(matrix)
        self.register_buffer("scale", scale)  # [N]
        self.register_buffer("zero", torch.zeros(len(scale), dtype=torch.int32))
        self.bias: Any = layer.bias
        self._saved_t = type(layer) is Conv1D
        self.prepack(integers)
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
        middle = self.levels + 1  # what zero is as an unsigned byte, which is what the kernels take
        bytes_ = halves.add_(middle + 0.5).to(torch.uint8)  # cutting off after the point rounds
        product = self._compilable if torch.compiler.is_compiling() else _product
        y: Tensor = product(bytes_, middle, self._packed, self.scale, self.zero)  # [2 R, N]
        y = y[:rows].add_(y[rows:].div_(finer)).mul_(step)
        if self.bias is not None:
            y = y.add_(self.bias)
        return y.view(*x.shape[:-1], self.out_features)

    def prepack(self, plain: Tensor) -> None:
        """Takes over the weight ``[N, K]``, int8, which is not kept."""
        self._packed = _pack(plain)
        self._compilable = as_custom_op("int8_linear", _product, _shape)

    def plain(self) -> Tensor:
        """Returns the weight ``[N, K]``, int8: a copy."""
        return self._packed.to_dense().t().contiguous()

    def plain_weight(self) -> Tensor:
        """Returns a copy of the weight, rounded, as the layer that this one replaced holds it."""
        rounded = self.plain() * self.scale[:, None]
        return rounded.t().contiguous() if self._saved_t else rounded

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Saves the weight of the layer that this one replaced, rounded."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[prefix + "scale"], destination[prefix + "zero"]
        destination[prefix + "weight"] = self.plain_weight()


def _pack(integers: Tensor) -> Tensor:
    # The number of rows is a hint.
    packed: Tensor = torch.ops.onednn.qlinear_prepack(integers, [16, integers.shape[1]])
    return packed


def _product(x: Tensor, middle: int, packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Returns bytes x ``[R, K]`` less middle, times the weight and its channels' scales."""
    y: Tensor = torch.ops.onednn.qlinear_pointwise(
        x, 1.0, middle, packed, scale, zero, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return y


def _shape(x: Tensor, middle: int, packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return scale.new_empty(x.shape[0], scale.shape[0])


def int8_levels() -> int:
    """Returns up to which integer activations are multiplied exactly here, 127 or 63; 0: none are.

    Without VNNI, pairs of products are added up in 16 bits, which full bytes overflow.
    """
    ones, zero = torch.ones(32), torch.zeros(32, dtype=torch.int32)
    try:
        packed = _pack(torch.full((32, 64), 127, dtype=torch.int8))
        for levels in (127, 63):
            x = torch.full((2, 64), 2 * levels + 1, dtype=torch.uint8)
            if bool((_product(x, levels + 1, packed, ones, zero) == 127 * 64 * levels).all()):
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
    if dtype != torch.float32:
        raise ConfigError(
            f"quantization {quantization!r} on a CPU computes in float32, not in "
            f"{str(dtype).removeprefix('torch.')}: use dtype 'float32'."
        )
    if quantization == "int4" and native() is None:
        raise ConfigError(
            f"quantization 'int4' on a CPU needs a C++ compiler, and {build().problem}: install "
            "one (such as g++), or use 'int8'."
        )
    if native() is None and int8_levels() == 0:
        raise ConfigError(
            "quantization 'int8' needs a C++ compiler, or torch with oneDNN's integer products, "
            "which this processor or this build of torch lacks: install one, or leave "
            "quantization out."
        )


@torch.no_grad()
def quantize(model: nn.Module, quantization: Quantization, *, blocks: bool = False) -> None:
    """Exchanges the linear layers of a model for quantised ones, in place.

    Embeddings stay; a head that is tied to one gets integers of its own. blocks: whether 8-bit
    weights are in blocks, as those of 4 bits always are. Raises ``UnsupportedModel`` where most of
    what a pass reads is in other layers.
    """
    _check_layers(model)
    if next(model.parameters()).device.type != "cpu":
        return _by_torchao(model, quantization)
    library = native()
    if library is None:
        levels = int8_levels()
        replace_modules(linear_layers(model), lambda layer: Int8Linear(layer, levels))
    else:
        makes = {"int4": native_int4, "int8": native_int8_blocks if blocks else native_int8}
        replace_modules(linear_layers(model), lambda layer: makes[quantization](library, layer))


def native_int4(library: Native, layer: Any) -> NativeBlockLinear:
    """Returns a layer with a plain linear one's weight in blocks of 4 bits; ``UnsupportedModel``
    as `to_four_bits`."""
    matrix = matrix_of(layer)
    return NativeBlockLinear(library, to_four_bits(matrix), layer.bias, matrix.shape[1])


def native_int8_blocks(library: Native, layer: Any) -> NativeBlockLinear | NativeLinear:
    """Returns a layer with a plain linear one's weight in blocks of 8 bits, or with a scale of 32
    bits for each output where those of blocks, of 16, do not reach."""
    matrix = matrix_of(layer)
    if not float(matrix.abs().max()) <= EIGHT_BITS * torch.finfo(torch.float16).max:
        return native_int8(library, layer)
    filled = functional.pad(matrix, (0, -matrix.shape[1] % BLOCK))
    return NativeBlockLinear(library, in_blocks(filled, "Q8_0"), layer.bias, matrix.shape[1])


def rounds_activations(model: nn.Module, quantization: Quantization, *, blocks: bool) -> bool:
    """Returns whether `quantize` makes a model's layers round their inputs too, and not only their
    weights: all but our own products of 8-bit weights that are not in blocks do."""
    elsewhere = next(model.parameters()).device.type != "cpu" or native() is None
    return elsewhere or blocks or quantization == "int4"


def check_quantized(model: nn.Module, quantization: str | None) -> None:
    """Raises ``UnsupportedModel`` where a token would not have the same numbers alone and among
    drafts: asked when a model has been prepared."""
    on_cpu = next(model.parameters()).device.type == "cpu"
    if quantization == "int4" and on_cpu and not isinstance(model.forward, NativeModel):
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be quantised to 'int4' on a CPU, because its passes "
            "are not computed by our own code alone: that takes decoder layers that it knows, and "
            "cpu_kernels 'auto'. Use 'int8', or leave quantization out."
        )


def pays(model: nn.Module) -> bool:
    """Returns whether 8-bit weights make a model's passes faster, judged by its layers: most of
    what a pass reads is in large linear layers, and our own products compute these."""
    weights = [getattr(parent, name).weight for parent, name in linear_layers(model)]
    where, kind = next(model.parameters()).device, next(model.parameters()).dtype
    if where.type != "cpu" or kind != torch.float32 or native() is None:
        return False
    sizes = {id(weight): weight.numel() for weight in weights}.values()
    large = sum(size for size in sizes if size >= WORTH)
    return 2 * large > sum(sizes) and _inside(model) > _outside(model)


def _inside(model: nn.Module) -> int:
    """Weights in plain linear layers."""
    layers: list[Any] = [getattr(parent, name) for parent, name in linear_layers(model)]
    return sum({id(layer): layer.weight.numel() for layer in layers}.values())


def _outside(model: nn.Module) -> int:
    """Weights in others, besides embeddings."""
    layers: list[Any] = [getattr(parent, name) for parent, name in linear_layers(model)]
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    linear = {id(layer.weight) for layer in layers}
    others = {id(w): w.numel() for w in model.parameters() if id(w) not in tables | linear}
    return sum(others.values())


def _check_layers(model: nn.Module) -> None:
    inside, outside = _inside(model), _outside(model)
    if inside <= outside:
        raise UnsupportedModel(
            f"{type(model).__name__} keeps {outside:,} of its weights outside plain linear layers "
            f"(in those {inside:,}), as mixtures of experts do, and only these can be quantised: "
            "leave quantization out."
        )


def _by_torchao(model: nn.Module, quantization: Quantization) -> None:
    dtype = next(model.parameters()).dtype
    if dtype != torch.bfloat16 and (quantization == "int4" or dtype != torch.float16):
        raise ConfigError(
            f"quantization {quantization!r} on a GPU computes in 16 bits, not in "
            f"{str(dtype).removeprefix('torch.')}: use dtype 'bfloat16'."
        )
    if any(type(module) is Conv1D for module in model.modules()):
        raise UnsupportedModel(
            f"{type(model).__name__} has GPT-2's kind of linear layers, which torchao does not "
            "quantise: leave quantization out, or run it on a CPU."
        )
    torchao = _torchao()
    schemes = {
        "int8": torchao.Int8WeightOnlyConfig,
        # The layout that torch's own kernel reads: the usual one needs another package.
        "int4": partial(torchao.Int4WeightOnlyConfig, int4_packing_format="tile_packed_to_4d"),
    }
    try:
        torchao.quantize_(model, schemes[quantization]())
    except ImportError as error:
        raise ConfigError(
            f"torchao needs another package for quantization {quantization!r} ({error}): install "
            "it, or leave quantization out."
        ) from error


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
