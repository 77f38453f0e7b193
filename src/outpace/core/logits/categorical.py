"""Drawing tokens from a distribution: it is summed up once, however many tokens are drawn."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

BLOCK = 256
"""Tokens whose mass is summed up beforehand: a draw then looks at V / 256 sums and 256 tokens."""

SMALL = 1 << 15
"""Vocabulary up to which summing all of it takes less than the operations that blocks need. Rows do
not count: one draws in a batch as it does alone."""

UNITS = 2.0**61
"""Whole units that a distribution's mass is cut into. An int64 can count four times as many, which
leaves room for rounding up."""


class Categorical(ABC):
    """Draws tokens from unnormalised distributions ``[..., V]`` by given uniforms.

    A uniform picks the token at which the distribution's cumulative sum passes it, and never one of
    mass 0. No mass may be negative. Once no mass is left, token 0 is drawn.

    >>> tokens = Categorical.of(torch.tensor([0.0, 0.25, 0.75]))
    >>> tokens.draw(torch.tensor([0.2, 0.3])).tolist()
    [1, 2]
    >>> tokens.remove(torch.tensor([1]))
    >>> tokens.draw(torch.tensor([0.2])).tolist()
    [2]
    """

    @staticmethod
    def of(distribution: Tensor) -> Categorical:
        """Returns the kind that is fastest for a vocabulary of this size on this device."""
        small = distribution.device.type == "cpu" and distribution.shape[-1] <= SMALL
        return CumulativeCategorical(distribution) if small else Blocks(distribution)

    @abstractmethod
    def draw(self, u: Tensor) -> Tensor:
        """Returns the tokens ``[..., k]`` that uniforms ``[..., k]`` pick, all from what is there
        now."""

    @abstractmethod
    def remove(self, token: Tensor) -> None:
        """Takes out a token ``[..., 1]`` of each distribution."""


class CumulativeCategorical(Categorical):
    """The cumulative sum itself. It never falls where it is computed in order, as on a CPU."""

    def __init__(self, distribution: Tensor) -> None:
        self._distribution, self._ours = distribution, False  # not the caller's memory
        self._ends = distribution.cumsum(-1, dtype=torch.float64)

    def draw(self, u: Tensor) -> Tensor:
        ends = self._ends
        # Without any mass the sum is passed nowhere.
        token = torch.searchsorted(ends, u * ends[..., -1:], right=True)
        return token.remainder_(ends.shape[-1])

    def remove(self, token: Tensor) -> None:
        if not self._ours:
            self._distribution, self._ours = (
                self._distribution.clone(memory_format=torch.contiguous_format),
                True,
            )
        self._distribution.scatter_(-1, token, 0.0)
        self._ends = self._distribution.cumsum(-1, dtype=torch.float64)


class Blocks(Categorical):
    """Sums of blocks of neighbouring tokens: a uniform picks one of them and, by what is left of
    it, a token in there."""

    def __init__(self, distribution: Tensor) -> None:
        size = min(BLOCK, distribution.shape[-1])
        beyond = -distribution.shape[-1] % size
        padded = torch.nn.functional.pad(distribution, (0, beyond)) if beyond else distribution
        self._blocks = padded.view(*distribution.shape[:-1], -1, size)  # [..., C, W]
        self._ours = beyond > 0  # not the caller's memory
        self._mass = self._blocks.sum(-1, dtype=torch.float64)  # [..., C]
        self._total = self._mass.sum(-1, keepdim=True)

    def draw(self, u: Tensor) -> Tensor:
        if self._blocks.shape[-2] == 1:
            shares = _units(self._blocks[..., 0, :], self._total)
            return _pick(shares.cumsum(-1), u)[0]
        shares = _units(self._mass, self._total)
        ends = shares.cumsum(-1)
        block, unit = _pick(ends, u)
        inside = unit - (ends - shares).gather(-1, block)  # counted from the block's first unit
        ends = _units(self._rows(block), self._total[..., None]).cumsum(-1)  # [..., k, W]
        # The block's share was rounded as a whole, and its tokens' one by one.
        last = ends[..., -1:] - 1
        token = torch.searchsorted(ends, torch.minimum(inside[..., None], last), right=True)
        return token[..., 0].add_(block, alpha=self._blocks.shape[-1])

    def remove(self, token: Tensor) -> None:
        if not self._ours:
            own = self._blocks.clone(memory_format=torch.contiguous_format)
            self._blocks, self._ours = own, True
        self._blocks.flatten(-2).scatter_(-1, token, 0.0)
        block = token // self._blocks.shape[-1]
        self._mass.scatter_(-1, block, self._rows(block).sum(-1, dtype=torch.float64))
        # Where nothing is left each share is to be 0, not 0 / 0.
        smallest = torch.finfo(torch.float64).tiny
        self._total = self._mass.sum(-1, keepdim=True).clamp_(min=smallest)

    def _rows(self, block: Tensor) -> Tensor:
        """``[..., k, W]``: the masses of the tokens in the blocks ``[..., k]``."""
        index = block[..., None].expand(*block.shape, self._blocks.shape[-1])
        return self._blocks.gather(-2, index)


def _units(mass: Tensor, total: Tensor) -> Tensor:
    """Each share in whole units, because a parallel sum of floats (CUDA) need neither rise nor
    repeat itself. Rounded up, so that what has mass has a unit and nothing else has."""
    return (mass / total).mul_(UNITS).ceil_().long()


def _pick(ends: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The index ``[..., k]`` that ``u`` picks of shares that end at ``ends`` [..., n], and the
    unit."""
    units = ends[..., -1:]
    unit = torch.minimum((u * units).long(), units - 1)
    return torch.searchsorted(ends, unit, right=True), unit
