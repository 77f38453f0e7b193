"""How large a deviation the bets of a sequential test would have caught, by simulation.

The same laws that a run has met are played again with tokens from a law that is off by a stated
amount in a stated way, and the least amount is sought at which 90 % of the simulated runs raise
the alarm. Only the rank bets take part, so that the true test can only be better.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from outpace.audit.sequential import Array, tilt_gains

KEPT = 64
"""Most probable tokens of each law that are remembered one by one."""
CHECKPOINTS = 24
WORLDS = 50


@dataclass
class Design:
    """The laws that a run has met, short of their tails."""

    heads: list[Array] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def add(self, position: int, law: Tensor) -> None:
        """Remembers a law ``[V]`` met at a position (from 0) of its text."""
        head = np.zeros(KEPT)
        top = torch.topk(law, min(KEPT, law.shape[-1])).values.double().cpu().numpy()
        head[: len(top)] = top
        self.heads.append(head)
        self.sizes.append(int((law > 0).sum()))
        self.positions.append(position)


class Simulation:
    """Runs against laws that are off in one way.

    "sharper": a share of the tokens is the law's most probable one instead of a draw (a drafted
    argmax that is told to be a sample errs like this). "flatter": a share is drawn evenly from the
    tokens that the options leave (a law that misses its temperature or its truncation errs like
    this).
    """

    def __init__(self, design: Design, way: str, slack: float, seed: int = 0) -> None:
        self._edges = np.concatenate(
            [np.zeros((len(design.heads), 1)), np.stack(design.heads).cumsum(1)], 1
        ).clip(max=1.0)  # [n, KEPT + 1]
        self._sizes = np.array(design.sizes)
        self._positions = np.array(design.positions)
        self._way = way
        self._slack = slack
        self._generator = np.random.default_rng(seed)

    def variation(self, share: float) -> float:
        """Returns the mean total variation per token when ``share`` of the tokens is off."""
        head = np.diff(self._edges, axis=1)
        if self._way == "sharper":
            return share * float((1 - head[:, 0]).mean())
        even = 1 / self._sizes[:, None]
        listed = np.arange(KEPT) < self._sizes[:, None]
        inside = (np.abs(head - even) * listed).sum(1)
        tail = np.abs(1 - head.sum(1) - (1 - KEPT * even[:, 0]).clip(min=0))
        return share * float((inside + tail).mean() / 2)

    def power(self, share: float, alpha: float, stakes: tuple[float, float]) -> float:
        """Returns the share of runs that raise the alarm. stakes: on all tokens, on each
        position."""
        alarms = [self._run(share, stakes) >= -math.log(alpha) for _ in range(WORLDS)]
        return float(np.mean(alarms))

    def _run(self, share: float, stakes: tuple[float, float]) -> float:
        """Plays once; returns the greatest logarithm of the wealth at the checkpoints."""
        low, high = self._draw(share)
        gains = tilt_gains(low, high, self._slack)  # [n, bets]
        count, places = len(gains), int(self._positions.max()) + 1
        when = np.arange(count) * CHECKPOINTS // count
        table = np.zeros((CHECKPOINTS, places, gains.shape[1]))
        np.add.at(table, (when, self._positions), gains)
        placed = table.cumsum(0)
        pooled = placed.sum(1)
        wealth = stakes[0] * _mean_exp(pooled, 1) + stakes[1] * _mean_exp(placed, (1, 2))
        return float(np.log(wealth.max()))

    def _draw(self, share: float) -> tuple[Array, Array]:
        rows = np.arange(len(self._sizes))
        u = self._generator.random(len(rows))
        index = (u[:, None] >= self._edges[:, 1:]).sum(1)  # KEPT: beyond what is remembered
        off = self._generator.random(len(rows)) < share
        if self._way == "sharper":
            index[off] = 0
        else:
            even = (self._generator.random(len(rows)) * self._sizes).astype(np.int64)
            index[off] = even.clip(max=KEPT)[off]
            beyond = self._edges[:, KEPT]
            u = np.where(off, beyond + (1 - beyond) * self._generator.random(len(rows)), u)
        known = index < KEPT
        at = index.clip(max=KEPT - 1)
        low = np.where(known, self._edges[rows, at], u)
        high = np.where(known, self._edges[rows, at + 1], u)
        return low, high


def _mean_exp(logs: Array, axis: int | tuple[int, ...]) -> Array:
    mean: Array = np.exp(logs.clip(max=600)).mean(axis)
    return mean


def detectable(
    design: Design, alpha: float, stakes: tuple[float, float], slack: float, power: float = 0.9
) -> dict[str, float | None]:
    """Returns, per way of being off, the least total variation per token that is caught with this
    probability; None where even the greatest would not be."""
    found: dict[str, float | None] = {}
    for way in ("sharper", "flatter"):
        simulation = Simulation(design, way, slack)
        if simulation.power(1.0, alpha, stakes) < power:
            found[way] = None
            continue
        low, high = 0.0, 1.0
        for _ in range(7):
            middle = (low + high) / 2
            if simulation.power(middle, alpha, stakes) < power:
                low = middle
            else:
                high = middle
        found[way] = simulation.variation(high)
    return found
