"""Makes a model that was just loaded fast, and checks what it computes then."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from outpace.core.progress import Progress
from outpace.targets.cpu.kernels import EXPLICIT_KERNELS, NATIVE, Kernels, speed_up
from outpace.targets.cpu.native import native
from outpace.targets.cpu.native_layers.blocks import dequantize_blocks, use_block_kernels
from outpace.targets.cpu.native_layers.layer import leave_native_layers, use_native_layers
from outpace.targets.cpu.native_layers.linear import (
    NativeLinear,
    fuse_products,
    prepack_weights,
)
from outpace.targets.cpu.native_layers.model import use_native_model
from outpace.targets.cpu.weights.blocks import BlockLinear, embedding_dtype
from outpace.targets.cpu.weights.layers import dtype_sensitive_layers
from outpace.targets.cpu.weights.quantize import (
    Quantization,
    check_quantized,
    quantize,
    rounds_activations,
)
from outpace.targets.hf import support, trials
from outpace.targets.hf.attention import attention_for, use_grouped
from outpace.targets.hf.gguf.building import tiny_model_of
from outpace.targets.hf.kinds import compute_in_float64
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.plain import dummy_tokens, forward_uncached

LOGGER = logging.getLogger("outpace")


@dataclass(frozen=True)
class _Plan:
    """How the weights of a model that was just loaded will be held, and what reads them."""

    kernels: Kernels
    quantization: Quantization | None
    blocks: bool
    """Whether weights of 8 bits are in blocks."""

    @classmethod
    def of(cls, loaded: LoadedModel, compiled: bool) -> _Plan:
        """compiled: whether the model's passes will be compiled."""
        kernels, quantization = _kernels_for(loaded), loaded.quantization
        blocks = quantization == "int8" and not compiled and _is_ours_in_blocks(loaded, kernels)
        return cls(kernels, quantization, blocks)

    def rounds(self, model: nn.Module) -> bool:
        """Whether quantised layers round their inputs too."""
        wanted = self.quantization
        return wanted is not None and rounds_activations(model, wanted, blocks=self.blocks)


def prepare(loaded: LoadedModel, report: Progress, *, compiled: bool) -> None:
    """Replaces the layers of a model that was just loaded, and checks what it computes then.

    compiled: whether its passes will be compiled.
    """
    model = loaded.model
    set_up(model)
    report("arranging the weights for this processor", 0.4)
    plan = _Plan.of(loaded, compiled)
    rounded = plan.rounds(model)
    if rounded:
        # Checked exactly before, because rounding cannot be told from an ignored mask afterwards.
        trials.probe(model)
    in_blocks = _replace_layers(model, plan)
    if in_blocks and not _in_native_code(model):
        _dequantize(loaded, plan.kernels)
        in_blocks = False
    report("checking that drafts are scored as plain text is", 0.7)
    if any(isinstance(module, BlockLinear) for module in model.modules()):
        trials.check_numbers(model)  # Each pass takes seconds; the rest was tried on a tiny model.
    else:
        trials.probe(model, coarse=rounded or in_blocks)
    if plan.kernels in NATIVE and not in_blocks:
        report("trying whole layers in native code", 0.85)
        _in_native_code(model)
    check_quantized(model, plan.quantization)
    report("loaded", 1.0)


def _kernels_for(loaded: LoadedModel) -> Kernels:
    """What its layers may be replaced by: on a GPU by nothing, unless that was asked for, which is
    refused where it is tried."""
    kernels = loaded.cpu_kernels or "off"
    return kernels if loaded.device.type == "cpu" or kernels in EXPLICIT_KERNELS else "off"


def set_up(model: nn.Module) -> None:
    """Has a model that was just loaded compute as it will from now on; raises ``UnsupportedModel``
    for one with which drafts cannot be scored, by what it says of itself."""
    use_grouped(model)
    compute_in_float64(model)
    support.check(model)
    # RWKV divides some of its weights in its first pass, and must find them as they were loaded.
    if any(hasattr(part, "layers_are_rescaled") for part in model.modules()):
        forward_uncached(model, dummy_tokens(model, 1))


def _is_ours_in_blocks(loaded: LoadedModel, kernels: Kernels) -> bool:
    """Whether our own code will compute all of a model's passes over a few tokens once its weights
    are in blocks: tried with a small model of the same kind."""
    model: Any = loaded.model
    plain = model.dtype == torch.float32 and "forward" not in model.__dict__
    if kernels not in NATIVE or native() is None or not plain or model.device.type != "cpu":
        return False
    try:
        small = tiny_model_of(model.config, torch.float32, attention_for(model.config))
        quantize(small, "int8", blocks=True)
        return type(small) is type(model) and _in_native_code(small)
    except Exception:  # models raise all sorts when they are made small
        return False


def _replace_layers(model: Any, plan: _Plan) -> bool:
    """Puts faster or quantised layers in the place of plain ones; returns whether some of them have
    weights in blocks, whose products round their inputs. Those of 4 bits are not counted, because
    no others may take their place (`check_quantized`)."""
    asked = [
        (parent, name, getattr(parent, name).weight.dtype)
        for parent, name in dtype_sensitive_layers(model)
    ]
    ours = plan.kernels in NATIVE
    if plan.quantization is not None:
        quantize(model, plan.quantization, blocks=plan.blocks)
        in_blocks = plan.blocks
    else:
        plain = embedding_dtype(model.get_input_embeddings()) == torch.float32
        held = any(isinstance(module, BlockLinear) for module in model.modules())
        # Next to blocks all other products have to be our own, or the whole would be dequantised.
        native_only = ours and plain and held and native() is not None
        speed_up(model, "native" if native_only else plan.kernels)
        in_blocks = ours and plain and use_block_kernels(model) > 0
    if ours:
        prepack_weights(model, tune=plan.kernels == "tune")
    for parent, name, dtype in asked:
        layer = getattr(parent, name)
        if isinstance(layer, NativeLinear):
            layer.show(dtype)
    return in_blocks


def _in_native_code(model: nn.Module) -> bool:
    """Lets our own code compute what it can of a model; returns whether that is the whole of it."""
    fuse_products(model)
    use_native_layers(model)
    return use_native_model(model)


def _dequantize(loaded: LoadedModel, kernels: Kernels) -> None:
    """Puts float32 weights in the place of those in blocks.

    Products of blocks round their inputs. Where attention is not our own it adds up in another
    order when several tokens share a pass, which now and then decides how an input is rounded:
    speculation would change the text.
    """
    leave_native_layers(loaded.model)
    LOGGER.warning(
        "outpace: the weights of %s are dequantised from blocks to float32 (%.2f GB), because "
        "models of this kind are not wholly computed by outpace's own code.",
        loaded.name,
        dequantize_blocks(loaded.model) / 1e9,
    )
    speed_up(loaded.model, kernels)
    prepack_weights(loaded.model, tune=kernels == "tune")
