"""The best weights for choosing one of two drafts, for `CanonicalRule`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import linprog
from scipy.sparse import coo_matrix
from torch import Tensor

from outpace.verify.siblings import quotient

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Pairing:
    """Which of two tokens is taken, in each of R rows, and the distribution that the taken token
    has."""

    induced: Tensor  # [R, V], p_I
    place: Tensor  # [R, V], rank by p / q: of two tokens the one with the larger rank is taken,
    # unless both are in the alphabet
    among: Tensor  # [R, V], index into `table`, or -1 for tokens outside the alphabet
    table: Tensor  # [R, A, A], weight of the first of two tokens of the alphabet

    def weight(self, row: Tensor, one: Tensor, other: Tensor) -> Tensor:
        """Returns the probability of taking ``one`` of the two tokens, 1 if they are equal."""
        larger = (self.place[row, one] >= self.place[row, other]).double()
        if self.table.shape[-1] == 0:
            return larger
        i, j = self.among[row, one], self.among[row, other]
        known = self.table[row, i.clamp(min=0), j.clamp(min=0)]
        return torch.where((i >= 0) & (j >= 0), known, larger)


def best_pairing(
    p: Tensor,
    first: Tensor,
    second: Tensor,
    size: int,
    needed: Tensor,
    known: Tensor | None = None,
) -> Pairing:
    """Returns the pairing of independent drafts with distributions ``first`` and ``second``.

    p, first, second: ``[R, V]`` float64; size: length of the alphabet; needed: ``[R]`` bool, the
    rows that anybody asks for; known: ``[R, A, A]``, the `Pairing.table` of the same distributions,
    if it was solved before.
    """
    size = min(size, p.shape[-1])
    place = quotient(p, second).argsort(dim=-1, stable=True).argsort(dim=-1)
    induced = first * second + first * _below(second, place) + second * _below(first, place)
    alphabet = (first + second).topk(size, -1).indices  # [R, A]
    among = torch.full_like(place, -1).scatter(
        1, alphabet, torch.arange(size, device=p.device).expand_as(alphabet)
    )
    p_a, first_a, second_a, place_a = (x.gather(1, alphabet) for x in (p, first, second, place))
    pair = first_a[:, :, None] * second_a[:, None, :]
    pair = pair + pair.transpose(1, 2)  # [R, A, A]: probability of the unordered pair
    larger = (place_a[:, :, None] > place_a[:, None, :]).double()
    fixed = induced.gather(1, alphabet) - (pair * larger).sum(-1)
    table = larger + torch.eye(size, dtype=p.dtype, device=p.device)
    if known is not None:
        table = known
    elif size > 1:
        table[needed] = _solve(p_a[needed], fixed[needed], pair[needed]).to(p.device)
    off = 1 - torch.eye(size, dtype=p.dtype, device=p.device)
    induced = induced.scatter(1, alphabet, fixed + (pair * table * off).sum(-1))
    induced = induced.clamp(min=0)  # the differences above may round below
    return Pairing(induced, place, among, table)


def _below(distribution: Tensor, place: Tensor) -> Tensor:
    """Returns ``[R, V]``: the mass of the tokens placed below each token."""
    ordered = torch.zeros_like(distribution).scatter(1, place, distribution)
    return (ordered.cumsum(-1) - ordered).gather(1, place)


def _solve(p: Tensor, fixed: Tensor, pair: Tensor) -> Tensor:
    """Returns ``[R, A, A]``: the best weights of each row."""
    rows, size = p.shape
    problems = torch.cat([p, fixed, pair.flatten(1)], 1).cpu().numpy()
    distinct, which = np.unique(problems, axis=0, return_inverse=True)
    tables = [_remembered(problem.tobytes(), size) for problem in distinct]
    found = np.stack(tables) if tables else np.zeros((0, size, size))
    return torch.from_numpy(found[which.reshape(rows)])


@lru_cache(maxsize=1024)
def _remembered(problem: bytes, size: int) -> Array:
    """Returns what `_programme` does; equal nodes and equal rounds ask for the same."""
    row = np.frombuffer(problem)
    return _programme(row[:size], row[size : 2 * size], row[2 * size :].reshape(size, size))


def _programme(p: Array, fixed: Array, pair: Array) -> Array:
    """Returns ``[A, A]`` maximising sum m, with m <= p and m <= fixed + sum over j of pair_yj w_yj.

    The variables are m, then w_ij for i < j, where w_ji = 1 - w_ij.
    """
    size = len(p)
    i, j = np.triu_indices(size, 1)
    flow, pairs = pair[i, j], np.arange(len(i))
    rows = np.concatenate([np.arange(size), i, j])
    columns = np.concatenate([np.arange(size), size + pairs, size + pairs])
    values = np.concatenate([np.ones(size), -flow, flow])
    limit = fixed + np.bincount(j, weights=flow, minlength=size)
    found = linprog(
        c=np.concatenate([-np.ones(size), np.zeros(len(i))]),
        A_ub=coo_matrix((values, (rows, columns)), shape=(size, size + len(i))).tocsr(),
        b_ub=limit,
        bounds=np.concatenate(
            [np.stack([np.full(size, -1.0), p], 1), np.tile([0.0, 1.0], (len(i), 1))]
        ),
        method="highs",
    )
    # Any weights are exact; should the solver fail, an even choice is.
    weight = np.clip(found.x[size:], 0, 1) if found.x is not None else np.full(len(i), 0.5)
    table = np.eye(size)
    table[i, j], table[j, i] = weight, 1 - weight
    return table
