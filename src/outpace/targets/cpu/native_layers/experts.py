"""A mixture of experts, as `experts.h` computes it: read from transformers' modules.

Families differ in how scores follow from a router's logits, in what else decides a token's choice,
and in what an expert does between its products. Both are found out by calling the modules.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from outpace.targets.cpu.native_layers.blocks import NativeBlockLinear
from outpace.targets.cpu.native_layers.probing import is_plain
from outpace.targets.cpu.weights.experts import BlockExperts
from outpace.targets.cpu.weights.weight import BLOCK_PANEL, LinearStruct, linear_struct

MOST_EXPERTS = 1024
"""Experts of a layer (`experts.h`)."""

MOST_CHOSEN = 64
"""Experts of a token."""

SMALLEST = 1e-20
"""By which weights are divided at least."""

SAMPLES, AGREEING = 64, 0.9
"""Tokens that a router is tried with, and the share that has to agree: of nearly equal scores
either may be chosen."""

ROUTERS = ("gate", "router")
SHARED = ("shared_expert", "shared_experts")
SHARE = "shared_expert_gate"
CORRECTIONS = ("e_score_correction_bias", "expert_bias")
"""What counts for a token's choice only; the second is the layer's, which hands it to the router
(LFM2)."""


class Scoring(IntEnum):
    """How scores follow from logits, by the numbers in `experts.h`."""

    SOFTMAX = 0
    SIGMOID = 1


class ExpertGroups(NamedTuple):
    """A token chooses from those groups of experts whose ``best`` highest scores have the largest
    sums."""

    number: int = 1
    topk: int = 1
    best: int = 1


class MixtureStruct(ctypes.Structure):
    """`Mixture` of `experts.h`, field by field."""

    _fields_ = (
        *((name, LinearStruct) for name in ("router", "gate", "up", "down", "shared")),
        ("correction", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("experts", "top_k", "inner", "scoring")),
        *((name, ctypes.c_int64) for name in ("norm_topk", "groups", "topk_groups", "best")),
        ("scaling", ctypes.c_float),
    )


@dataclass(frozen=True)
class Routing:
    """How a router chooses."""

    top_k: int
    """Experts of a token."""
    scoring: Scoring
    norm_topk: bool
    """Whether a token's weights are divided by their sum."""
    groups: ExpertGroups
    scaling: float
    """By which weights are multiplied."""

    def weights(self, logits: Tensor, correction: Tensor | None) -> Tensor:
        """Returns the weights of all experts ``[T, E]``, 0 of those that are not chosen."""
        sigmoid = self.scoring is Scoring.SIGMOID
        scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
        choice = scores if correction is None else scores + correction
        if self.groups.number > 1:
            grouped = choice.view(len(logits), self.groups.number, -1)
            worth = grouped.topk(self.groups.best, -1).values.sum(-1)
            out = torch.ones_like(worth).scatter(1, worth.topk(self.groups.topk).indices, 0).bool()
            choice = grouped.masked_fill(out[..., None], -torch.inf).flatten(1)
        at = choice.topk(self.top_k).indices
        found = scores.gather(1, at)
        if self.norm_topk:
            found = found / found.sum(-1, keepdim=True).clamp_min(SMALLEST)
        return torch.zeros_like(logits).scatter(1, at, found * self.scaling)


@dataclass(frozen=True, eq=False)
class Mixture:
    """A mixture as the library computes it."""

    router: Any
    experts: BlockExperts
    share: Any
    """The layer that says how much the MLP counts that all tokens meet; None: it counts in full."""
    routing: Routing
    held: tuple[Any, str] | None = None
    """Where the correction is that counts for the choice only."""

    @property
    def modules(self) -> list[Any]:
        """The modules whose weights the library reads."""
        inside = [self.experts.gate_proj, self.experts.up_proj, self.experts.down_proj]
        return [self.router, *inside, *([] if self.share is None else [self.share])]

    @property
    def correction(self) -> Tensor | None:
        return None if self.held is None else self.held[0][self.held[1]]

    def struct(self, weights: dict[int, Any]) -> MixtureStruct:
        """Returns the mixture as the library reads it. weights: of its modules, by their ids."""
        parts = [linear_struct(weights[id(module)]) for module in self.modules]
        correction, routing = self.correction, self.routing
        return MixtureStruct(
            *parts[:4],
            parts[4] if self.share is not None else LinearStruct(),
            None if correction is None else correction.data_ptr(),
            *(self.experts.num_experts, routing.top_k, self.experts.intermediate_dim),
            *(routing.scoring, routing.norm_topk, *routing.groups, routing.scaling),
        )


def mixture_of(mlp: Any, lanes: int) -> Mixture | None:
    """Returns what a module may compute if it is a mixture of a known kind; None for others."""
    parts = dict(mlp.named_children())
    experts, share = parts.get("experts"), parts.get(SHARE)
    router = next((parts[name] for name in ROUTERS if name in parts), None)
    if not isinstance(experts, BlockExperts) or router is None or not experts_fit(experts, lanes):
        return None
    if share is not None and not (_is_plain_linear(share) and share.out_features == 1):
        return None
    names = ((owner._buffers, name) for owner in (router, mlp) for name in CORRECTIONS)
    held = next((each for each in names if each[0].get(each[1]) is not None), None)
    routing = _routing_of(router, experts, held)
    return None if routing is None else Mixture(router, experts, share, routing, held)


def experts_fit(experts: BlockExperts, lanes: int) -> bool:
    """Returns whether the library can compute experts of these sizes."""
    layers = (experts.gate_proj, experts.up_proj, experts.down_proj)
    sizes = experts.hidden_dim, experts.intermediate_dim
    return (
        all(isinstance(layer, NativeBlockLinear) for layer in layers)
        and experts.num_experts <= MOST_EXPERTS
        and all(size % BLOCK_PANEL == 0 and size % lanes == 0 for size in sizes)
    )


def _is_plain_linear(layer: Any) -> bool:
    plain = type(layer) is nn.Linear and layer.bias is None
    return plain and is_plain(layer.weight)


@torch.inference_mode()
def _routing_of(router: Any, experts: BlockExperts, held: tuple[Any, str] | None) -> Routing | None:
    """Returns how a router chooses, None if that is in no known way. held: see `Mixture`."""
    weight, bias = router._parameters.get("weight"), router._parameters.get("bias")
    correction, chosen = None if held is None else held[0][held[1]], getattr(router, "top_k", 0)
    handed = [] if held is None or held[0] is router._buffers else [correction]
    shape = (experts.num_experts, experts.hidden_dim)
    numbers = [each for each in (weight, bias, correction) if each is not None]
    known = len([*router.parameters(), *router.buffers()]) == len(numbers) - len(handed)
    if weight is None or weight.shape != shape or not known:
        return None
    if not all(map(is_plain, numbers)):
        return None
    if not 0 < chosen <= min(MOST_CHOSEN, experts.num_experts):
        return None
    x = torch.randn(SAMPLES, shape[1], generator=torch.Generator().manual_seed(0))
    try:
        _, given, at = router(x, *handed)
        wanted = torch.zeros(SAMPLES, shape[0]).scatter(1, at, given.float())
    except Exception:  # a router of another kind takes or returns something else
        return None
    logits = functional.linear(x, weight, bias)
    for candidate in _candidates(router, chosen, shape[0]):
        off = (candidate.weights(logits, correction) - wanted).abs().amax(-1)
        if float((off <= 1e-4 * wanted.abs().amax(-1)).float().mean()) >= AGREEING:
            return candidate
    return None


def _candidates(router: Any, chosen: int, experts: int) -> Iterator[Routing]:
    count = int(getattr(router, "num_group", None) or getattr(router, "n_group", None) or 1)
    kept = int(getattr(router, "topk_group", None) or 1)
    scaling = float(getattr(router, "routed_scaling_factor", 1.0))
    if experts % count or not kept <= count or kept * (experts // count) < chosen:
        return
    best = (2, 1) if count > 1 and experts // count > 1 else (1,)
    for scoring in Scoring:
        for normalised in (True, False):
            for each in best:
                yield Routing(chosen, scoring, normalised, ExpertGroups(count, kept, each), scaling)
