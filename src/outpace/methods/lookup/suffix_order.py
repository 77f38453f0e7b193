"""The order of all suffixes of a text, by their first tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


def suffix_order(
    tokens: NDArray[np.integer], depth: int, progress: Callable[[float], None] | None = None
) -> NDArray[np.int64]:
    """Returns the places ``[n]`` of a text's suffixes, sorted by their first ``depth`` tokens, a
    suffix that ends before those that go on.

    depth is rounded up to a power of two. Prefix doubling (Manber and Myers 1990): suffixes that
    are ranked by k tokens are ranked by 2 k with one sort. progress: called with the share of the
    work that is done.

    >>> suffix_order(np.array([3, 1, 3, 1, 2]), depth=2).tolist()
    [3, 1, 4, 0, 2]
    """
    rank, order = _ranked(tokens.astype(np.int64))
    known, rounds = 1, max(1, (depth - 1).bit_length())
    while known < depth and len(tokens) and rank.max() + 1 < len(tokens):
        after = np.zeros_like(rank)  # 0: the text has ended
        after[:-known] = rank[known:] + 1
        rank, order = _ranked(rank * (len(tokens) + 1) + after)
        known *= 2
        if progress is not None:
            progress((known.bit_length() - 1) / rounds)
    return order


def _ranked(keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns each key's rank among the different ones, and the order of the keys."""
    order = np.argsort(keys, kind="stable")
    ascending = keys[order]
    new = np.empty(len(keys), bool)
    new[:1] = False
    np.not_equal(ascending[1:], ascending[:-1], out=new[1:])
    rank = np.empty_like(keys)
    rank[order] = np.cumsum(new)
    return rank, order
