"""Norms and activations of transformers' modules, recognised by calling them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers.activations import ACT2FN

from outpace.targets.cpu.weights.experts import BlockExperts


def is_plain(numbers: Tensor) -> bool:
    """Returns whether our own code can read numbers as they lie: float32, and contiguous."""
    return numbers.dtype == torch.float32 and numbers.is_contiguous()


# -- norms -----------------------------------------------------------------------------------------


class NormKind(IntEnum):
    """Kinds of norms, by the numbers in `ops.h`."""

    NONE = 0
    RMS = 1
    LAYER = 2


class NormStruct(ctypes.Structure):
    """`Norm` of `ops.h`, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        ("kind", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("eps", "offset")),
    )


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm as the library computes it."""

    module: Any
    kind: NormKind
    eps: float
    offset: float
    """What is added to each weight: 1 in Gemma."""

    def struct(self) -> NormStruct:
        """Returns the norm as the library reads it. Valid as long as its weights stay."""
        bias = getattr(self.module, "bias", None)
        bias = None if bias is None else bias.data_ptr()
        return NormStruct(self.module.weight.data_ptr(), bias, self.kind, self.eps, self.offset)


def eps_of(norm: Any) -> float | None:
    """Returns what a norm adds to the mean of squares."""
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


@torch.inference_mode()
def norm_of(module: Any) -> Norm | None:
    """Returns what a module computes if it is a norm of a known kind, with weights in float32; None
    for others."""
    weight, bias = (getattr(module, name, None) for name in ("weight", "bias"))
    eps = eps_of(module)
    if not isinstance(weight, Tensor) or not isinstance(eps, float):
        return None
    held = [each for each in (weight, bias) if each is not None]
    if not all(map(is_plain, held)):
        return None
    if weight.device.type != "cpu" or len(list(module.parameters())) != len(held):
        return None
    # One sample of usual numbers, and one so small that what is added to its mean counts.
    sample = torch.sin(1.7 * torch.arange(weight.numel())).view(weight.shape) + 0.3
    samples = torch.stack([sample, sample * eps**0.5])
    wanted = module(samples)
    allowed = 1e-4 * wanted.abs() + 1e-5 * wanted.abs().max()  # NaN allows nothing
    for kind in (NormKind.RMS, NormKind.LAYER):
        centred = kind is NormKind.LAYER
        x = samples - samples.mean(-1, keepdim=True) if centred else samples
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        for offset in (0.0, 1.0):
            found = x * (weight + offset) + (0.0 if bias is None else bias)
            if bool(((found - wanted).abs() <= allowed).all()):
                return Norm(module, kind, eps, offset)
    return None


@torch.inference_mode()
def gated_norm_of(
    module: Any, size: int, activation: int, groups: int | None = None
) -> Norm | None:
    """Returns what a module computes if it takes ``x`` and a gate ``[..., size]``, and gives a norm
    of x times an activation of the gate. With ``groups`` it is the norm of that product, and each
    part of that size has its own, as in Mamba-2. None for others."""
    weight, eps = getattr(module, "weight", None), eps_of(module)
    if not isinstance(weight, Tensor) or not isinstance(eps, float):
        return None
    plain = is_plain(weight) and weight.shape == (size,)
    if not plain or weight.device.type != "cpu" or len(list(module.parameters())) != 1:
        return None
    numbers = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(2, size, generator=numbers) for _ in range(2))
    x[1] *= eps**0.5
    try:
        wanted = module(x, gate)
    except Exception:  # a norm of another kind takes something else
        return None
    opened = ACTIVATIONS[activation](gate)
    inner = (x if groups is None else x * opened).view(2, groups or 1, -1)
    found = (inner * torch.rsqrt(inner.square().mean(-1, keepdim=True) + eps)).flatten(1)
    found = found * opened if groups is None else found
    for offset in (0.0, 1.0):
        if torch.allclose(found * (weight + offset), wanted, rtol=1e-4, atol=1e-5):
            return Norm(module, NormKind.RMS, eps, offset)
    return None


# -- activations -----------------------------------------------------------------------------------


def _squared(x: Tensor) -> Tensor:
    return functional.relu(x).square()


ACTIVATIONS: Sequence[Callable[[Tensor], Tensor]] = (
    functional.silu,
    lambda x: functional.gelu(x, approximate="tanh"),
    functional.gelu,
    functional.relu,
    _squared,
)
"""In the order of their numbers in `ops.h`."""
SILU = 0
SWIGLU_OAI = len(ACTIVATIONS)
"""The number of gpt-oss's, as vLLM and llama.cpp call it."""


class Clip(NamedTuple):
    """The numbers of gpt-oss's activation."""

    alpha: float = 0.0
    limit: float = 0.0


NO_CLIP = Clip()


@torch.inference_mode()
def activation_of(module: Any) -> int | None:
    """Returns the number of an activation, None for an unknown one."""
    if module is None or any(True for _ in module.parameters()):
        return None
    x, _ = _gating_sample()
    wanted = module(x)
    same = (torch.allclose(function(x), wanted, rtol=1e-6, atol=1e-5) for function in ACTIVATIONS)
    return next((number for number, found in enumerate(same) if found), None)


def activation_named(name: Any) -> int | None:
    """Returns the number of an activation by the name that configurations give it."""
    return activation_of(ACT2FN[name]) if isinstance(name, str) and name in ACT2FN else None


@torch.inference_mode()
def activation_of_experts(
    experts: BlockExperts, activation: int | None, alone: bool
) -> tuple[int | None, Clip]:
    """Returns the number of an activation, None for an unknown one, and where it is clipped.

    activation: of the MLP that all tokens meet, if the experts are not alone: theirs is the same.
    """
    clip = _clip_of(experts)
    if clip is not None:
        return (SWIGLU_OAI if alone else None), clip
    gate, up = _gating_sample()
    wanted = experts.gated(gate, up)
    for number, function in enumerate(ACTIVATIONS):
        same = torch.allclose(function(gate) * up, wanted, rtol=1e-6, atol=1e-4)
        if same and (alone or number == activation):
            return number, NO_CLIP
    return None, NO_CLIP


@torch.inference_mode()
def _clip_of(experts: BlockExperts) -> Clip | None:
    """Returns the numbers of a clipped activation, None for experts of another kind."""
    alpha, limit = (getattr(experts.like, name, None) for name in ("alpha", "limit"))
    if not isinstance(alpha, float) or not isinstance(limit, float):
        return None
    gate, up = _gating_sample()
    bounded = gate.clamp(max=limit)
    found = bounded * torch.sigmoid(alpha * bounded) * (up.clamp(-limit, limit) + 1)
    same = torch.allclose(experts.gated(gate, up), found, rtol=1e-5, atol=1e-5)
    return Clip(alpha, limit) if same else None


def _gating_sample() -> tuple[Tensor, Tensor]:
    """Returns numbers as far as clipped ones differ, for what two products make."""
    gate = torch.linspace(-64, 64, 1025)
    return gate, 20 * torch.sin(7.1 * gate) + 0.5
