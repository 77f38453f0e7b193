"""Pairs of tiny models for the distribution gate: the distributions of target and drafter after
every prefix."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

# How target and drafter are related after a prefix.
KINDS = (
    "random",
    "peaked",
    "zeros",
    "ties",
    "near",
    "identical",
    "disjoint",
    "greedy",
    "flat target",
    "flat draft",
)

POWERS = (0, 0, 0, -1, -16, -40, -44)
"""Powers of ten of the probabilities in worlds of small numbers, down to float32's smallest."""


@dataclass(frozen=True, eq=False)
class World:
    """G pairs of tiny models, each a table of the distribution after each of C prefixes
    ("contexts").

    The contexts are all prefixes of at most ``depth`` tokens. The empty prefix is context 0, and
    the prefix of context c followed by token x is context c V + 1 + x.
    """

    p: Tensor  # [G, C, V] float64
    q: Tensor  # [G, C, V]
    second: Tensor  # [G, C, V], another distribution, for rules that score a draft in a second pass
    states: Tensor  # [G, C, H], for rules that read hidden states
    draft_states: Tensor  # [G, C, H], the drafter's own, for policies that read them
    depth: int

    @property
    def vocabulary(self) -> int:
        return self.p.shape[-1]

    @property
    def pairs(self) -> int:
        return self.p.shape[0]

    def contexts(self, tokens: Tensor, parents: list[int]) -> Tensor:
        """Returns ``[R, M]``: the context of each node of a tree. tokens: ``[R, N]``."""
        found = [torch.zeros_like(tokens[:, 0]) if tokens.shape[1] else tokens.sum(1)]
        for node, parent in enumerate(parents):
            found.append(found[parent] * self.vocabulary + 1 + tokens[:, node])
        return torch.stack(found, 1)

    def complete(self, mass: Tensor) -> Tensor:
        """Returns the joint distribution of the next ``depth + 1`` tokens, ``[..., G, V^(depth +
        1)]``.

        mass: ``[..., G, C V + 1]``, the probability of each emitted text: first the C contexts,
        then the texts of ``depth + 1`` tokens. Shorter texts are continued by the target.
        """
        start, size = 0, 1
        level = mass[..., :1]
        for _ in range(self.depth + 1):
            here = self.p[:, start : start + size]  # [G, size, V]
            start, size = start + size, size * self.vocabulary
            level = (level[..., None] * here).flatten(-2) + mass[..., start : start + size]
        return level

    def target(self) -> Tensor:
        """Returns the target's own joint distribution, ``[G, V^(depth + 1)]``."""
        nothing = torch.zeros(self.pairs, self.p.shape[1] * self.vocabulary + 1, dtype=self.p.dtype)
        nothing[:, 0] = 1
        return self.complete(nothing)


def make_world(pairs: int, vocabulary: int, depth: int, seed: int, features: int = 4) -> World:
    """Returns random models of all `KINDS`. The second half of the pairs changes its kind from
    prefix to prefix. features: the width H of the states."""
    contexts = sum(vocabulary**level for level in range(depth + 1))
    generator = torch.Generator().manual_seed(seed)
    shape = (pairs, contexts, vocabulary)
    kind = torch.arange(pairs)[:, None].expand(pairs, contexts) % len(KINDS)
    mixed = torch.randint(len(KINDS), (pairs, contexts), generator=generator)
    half = (torch.arange(pairs) < (pairs + 1) // 2)[:, None]
    kind = torch.where(half, kind, mixed)
    p, q = _probs(shape, generator)
    chosen = kind[None, :, :, None].expand(1, *shape)
    return World(
        p=p.gather(0, chosen)[0],
        q=q.gather(0, chosen)[0],
        second=_dirichlet(shape, 1.0, generator),
        states=torch.randn(pairs, contexts, features, generator=generator, dtype=torch.float64),
        draft_states=torch.randn(
            pairs, contexts, features, generator=generator, dtype=torch.float64
        ),
        depth=depth,
    )


def with_small_numbers(world: World, seed: int) -> World:
    """Returns the world with distributions whose probabilities are anything from 1 down to the
    smallest that a float32 can be; half of the drafter's are the target's, up to rounding at
    most."""
    generator = torch.Generator().manual_seed(seed)
    p, q = (_of_all_sizes(world.p.shape, generator) for _ in range(2))
    noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
    kind = torch.randint(4, (*p.shape[:2], 1), generator=generator)
    q = torch.where(kind == 0, _norm(p * (1 + 1e-15 * noise)), q)
    return replace(world, p=p, q=torch.where(kind == 1, p, q))


def _of_all_sizes(shape: torch.Size, generator: torch.Generator) -> Tensor:
    power = torch.tensor(POWERS)[torch.randint(len(POWERS), shape, generator=generator)]
    mass = 10 ** power.double() * torch.rand(shape, generator=generator, dtype=torch.float64)
    # A distribution of small numbers alone would have none any more once it is normalised.
    mass[..., 0] += mass.sum(-1) < 1e-3
    return _norm(mass)


def _probs(shape: tuple[int, int, int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns p and q of each kind, ``[kinds, G, C, V]``, in the order of ``KINDS``."""
    a, b = _dirichlet(shape, 1.0, generator), _dirichlet(shape, 1.0, generator)
    sharp_a, sharp_b = _dirichlet(shape, 5.0, generator), _dirichlet(shape, 5.0, generator)
    flat = torch.full(shape, 1 / shape[-1], dtype=torch.float64)
    low = torch.arange(shape[-1]) < max(1, shape[-1] // 2)
    best = torch.zeros(shape, dtype=torch.float64).scatter(-1, a.argmax(-1, keepdim=True), 1.0)
    near = _norm(a * (1 + 1e-9 * torch.randn(shape, generator=generator, dtype=torch.float64)))
    p = [a, sharp_a, _thinned(a, generator), _norm((a * 4).ceil()), a, a, _norm(a * low)]
    q = [b, sharp_b, _thinned(b, generator), _norm((b * 4).ceil()), near, a, _norm(b * ~low)]
    p += [best, flat, sharp_a]
    q += [b, sharp_b, flat]
    return torch.stack(p), torch.stack(q)


def _dirichlet(shape: tuple[int, ...], power: float, generator: torch.Generator) -> Tensor:
    """Dirichlet(1), sharpened by a power."""
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64).clamp(min=1e-12)
    return _norm((-uniform.log()) ** power)


def _thinned(distribution: Tensor, generator: torch.Generator) -> Tensor:
    """The distribution without some of its tokens, but never without the most probable one."""
    keep = torch.rand(distribution.shape, generator=generator) < 0.6
    keep |= distribution == distribution.amax(-1, keepdim=True)
    return _norm(distribution * keep)


def _norm(mass: Tensor) -> Tensor:
    return mass / mass.sum(-1, keepdim=True)
