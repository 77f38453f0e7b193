"""The power of a sequential test, by simulation: the smallest deviation that it would have caught.

A run is simulated with the distributions that the real one has met, but with tokens drawn from
distributions that are off by a stated amount in a stated way. The least amount is found at which 90
% of the simulated runs raise the alarm. Only the bets on ranks are simulated, so that the real test
catches at least as much.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.audit.sequential import Array, tilt_gains

Whole = NDArray[np.int64]
Truths = NDArray[np.bool_]

KEPT = 64
"""How many of the most probable tokens of each distribution are remembered one by one."""
CHECKPOINTS = 24
"""Moments of a simulated run at which its wealth is looked at."""
RUNS = 50
"""Simulated runs by which a probability of an alarm is estimated."""


@dataclass
class Design:
    """The distributions that a run has met, each without its least probable tokens."""

    heads: list[Array] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def add(self, position: int, distribution: Tensor) -> None:
        """Remembers a distribution ``[V]`` met at a position (from 0) of its text."""
        head = np.zeros(KEPT)
        top = (
            torch.topk(distribution, min(KEPT, distribution.shape[-1]))
            .values.double()
            .cpu()
            .numpy()
        )
        head[: len(top)] = top
        self.heads.append(head)
        self.sizes.append(int((distribution > 0).sum()))
        self.positions.append(position)


class Simulation(ABC):
    """Simulated runs of an engine that is wrong in one way."""

    def __init__(self, design: Design, slack: float, seed: int = 0) -> None:
        self._edges = np.concatenate(
            [np.zeros((len(design.heads), 1)), np.stack(design.heads).cumsum(1)], 1
        ).clip(max=1.0)  # [n, KEPT + 1]
        self._sizes = np.array(design.sizes)
        self._positions = np.array(design.positions)
        self._slack = slack
        self._generator = np.random.default_rng(seed)

    @abstractmethod
    def variation(self, share: float) -> float:
        """Returns the mean total variation per token if this share of the tokens is wrong."""

    @abstractmethod
    def _spoil(self, index: Whole, u: Array, off: Truths) -> Array:
        """Puts wrong tokens, by their places in the distribution, where ``off``; returns the noise
        ``u``."""

    def power(self, share: float, alpha: float, stakes: tuple[float, float]) -> float:
        """Returns the share of simulated runs that raise the alarm.

        share: of wrong tokens. stakes: the shares of the wealth on all tokens and by position.
        """
        alarms = [self._run(share, stakes) >= -math.log(alpha) for _ in range(RUNS)]
        return float(np.mean(alarms))

    def _run(self, share: float, stakes: tuple[float, float]) -> float:
        """Simulates a run; returns the logarithm of its greatest wealth at the checkpoints."""
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
        u = self._spoil(index, u, off)
        known = index < KEPT
        at = index.clip(max=KEPT - 1)
        low = np.where(known, self._edges[rows, at], u)
        high = np.where(known, self._edges[rows, at + 1], u)
        return low, high


class Sharper(Simulation):
    """Some of the tokens are the distribution's most probable one instead of a draw, as when a
    drafter hands over its argmax as if it were a sample."""

    def variation(self, share: float) -> float:
        first = self._edges[:, 1]
        return share * float((1 - first).mean())

    def _spoil(self, index: Whole, u: Array, off: Truths) -> Array:
        index[off] = 0
        return u


class Flatter(Simulation):
    """Some of the tokens are drawn evenly from those that the options leave, as when the
    temperature or a truncation is missed."""

    def variation(self, share: float) -> float:
        head = np.diff(self._edges, axis=1)
        even = 1 / self._sizes[:, None]
        listed = np.arange(KEPT) < self._sizes[:, None]
        inside = (np.abs(head - even) * listed).sum(1)
        tail = np.abs(1 - head.sum(1) - (1 - KEPT * even[:, 0]).clip(min=0))
        return share * float((inside + tail).mean() / 2)

    def _spoil(self, index: Whole, u: Array, off: Truths) -> Array:
        even = (self._generator.random(len(u)) * self._sizes).astype(np.int64)
        index[off] = even.clip(max=KEPT)[off]
        beyond = self._edges[:, KEPT]
        spoiled: Array = np.where(off, beyond + (1 - beyond) * self._generator.random(len(u)), u)
        return spoiled


WAYS: Mapping[str, type[Simulation]] = {"sharper": Sharper, "flatter": Flatter}


def _mean_exp(logs: Array, axis: int | tuple[int, ...]) -> Array:
    mean: Array = np.exp(logs.clip(max=600)).mean(axis)
    return mean


def detectable(
    design: Design, alpha: float, stakes: tuple[float, float], slack: float, power: float = 0.9
) -> dict[str, float | None]:
    """Returns, for each way of being wrong, the least total variation per token that is caught with
    the probability ``power``; None where not even the greatest would be."""
    found: dict[str, float | None] = {}
    for way, simulated in WAYS.items():
        simulation = simulated(design, slack)
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
