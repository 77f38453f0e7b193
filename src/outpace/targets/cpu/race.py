"""Races kernels against each other on this machine, for ``cpu_kernels="tune"`` only.

A race may end differently on two machines of the same kind, and on the same machine on two days.
Another kernel rounds differently, so that texts may differ too. The default is therefore a fixed
rule (`kernels.preferred`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from outpace.targets.cpu.weights.layers import matrix_of

RACE_ELEMENTS = 1 << 24
"""Elements of the weights that race: more than a processor's cache holds."""

RACE_ROWS = (1, 6)
"""Rows of the products that race: plain decoding, and scoring a draft."""

RACE_TURNS = 5
"""Timed turns of each kernel, after one that is not timed."""

HANDICAP = {"native": 1.0, "blocked": 1.2, "packed": 1.2}
"""What the time of a kernel is multiplied by. Native products save as much again, because whole
layers can be computed with them; and oneDNN holds a second copy of a weight that is an embedding
too."""

PROMPT_ROWS = 64
"""Rows of the products with which native kernels race against oneDNN's for prompts."""

ADVANTAGE = 1.25
"""How many times as fast oneDNN must be at prompts to be used for them: decoding takes longer than
reading prompts, and is faster with weights in panels."""


def fastest(layers: Sequence[Any], makers: Mapping[str, Callable[[Any], nn.Module]]) -> str:
    """Returns the name of the kernel that computes the model's commonest layer the fastest.

    layers: plain linear layers, at least one; they stay as they are. makers: by the kernel's name,
    what makes its layer of a plain one.
    """
    racers = _commonest(layers)
    width, dtype = matrix_of(racers[0]).shape[1], racers[0].weight.dtype
    inputs = [torch.ones(rows, width, dtype=dtype) for rows in RACE_ROWS]
    lanes = {
        name: _passes([_ready(make(_copy(layer))) for layer in racers], inputs)
        for name, make in makers.items()
    }
    took = best_seconds(lanes)
    return min(took, key=lambda name: took[name] * HANDICAP[name])


def native_reads_prompts(layer: Any) -> bool:
    """Returns whether our products of many rows are not much slower than oneDNN's."""
    matrix = layer.layout.rows(layer.read)
    ours = type(layer)(layer.library, nn.Parameter(matrix, requires_grad=False), None)
    inputs = [torch.ones(PROMPT_ROWS, layer.in_features)]
    lanes = {"ours": _passes([_ready(ours)], inputs), "onednn": lambda: layer.dense(inputs[0])}
    took = best_seconds(lanes)
    return took["ours"] <= ADVANTAGE * took["onednn"]


@torch.inference_mode()
def best_seconds(lanes: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Returns the seconds that each function takes in its best turn; they take turns.

    The best turn counts because whatever else runs on the processor can only add to a turn.
    """
    took: dict[str, list[float]] = {name: [] for name in lanes}
    for _ in range(1 + RACE_TURNS):
        for name, run in lanes.items():
            begin = perf_counter()
            run()
            took[name].append(perf_counter() - begin)
    return {name: min(times[1:]) for name, times in took.items()}


def _passes(layers: Sequence[nn.Module], inputs: Sequence[Tensor]) -> Callable[[], object]:
    return lambda: [layer(x) for layer in layers for x in inputs]


def _commonest(layers: Sequence[Any]) -> Sequence[Any]:
    """Returns layers of the shape that holds the most weights, as many as fill a cache."""
    by_shape: dict[Any, list[Any]] = defaultdict(list)
    for layer in layers:
        by_shape[layer.weight.shape].append(layer)
    most = max(by_shape.values(), key=lambda group: sum(layer.weight.numel() for layer in group))
    return most[: 1 + RACE_ELEMENTS // most[0].weight.numel()]


def _copy(layer: Any) -> nn.Linear:
    """Returns a layer with the same weight, which a kernel may change: the model's own stays."""
    matrix = matrix_of(layer)
    copy = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
    copy.weight = nn.Parameter(matrix, requires_grad=False)
    return copy


def _ready(layer: nn.Module) -> nn.Module:
    """Returns a layer in the form in which a loaded model uses it."""
    own: Any = layer
    if getattr(own, "can_prepack", False):
        own.prepack()
    return layer
