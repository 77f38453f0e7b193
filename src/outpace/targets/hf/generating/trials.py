"""Trying out a caller's own function or object before a text depends on it.

Logits processors and stopping criteria are asked about drafted tokens too, and one row at a time.
That is only right for those that are functions of what they are given, which a few calls of a copy
show in most cases.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor


def described(made: Any) -> str:
    """Returns an answer's shape in words, or the answer if it is no tensor."""
    return f"a tensor of shape {list(made.shape)}" if isinstance(made, Tensor) else repr(made)


def apart(called: Any) -> Any | None:
    """Returns a copy that can be called without changing the original, or None."""
    try:
        if not isinstance(called, FunctionType):
            return copy.deepcopy(called)
        # deepcopy returns a function as it is, with the variables around it that it may change.
        cells = [CellType(copy.deepcopy(cell.cell_contents)) for cell in called.__closure__ or ()]
        # Its default values may be changed too: a list, say, in which it notes what it has seen.
        defaults, named = copy.deepcopy((called.__defaults__, called.__kwdefaults__))
        made = FunctionType(
            called.__code__, called.__globals__, called.__name__, defaults, tuple(cells)
        )
        made.__kwdefaults__ = named
        return made
    except Exception:  # what cannot be copied cannot be tried without changing it
        return None


def answer(called: Callable[..., Any], ids: Tensor, scores: Tensor | None) -> Tensor | None:
    """Returns what is answered, None instead of an error: the history of a trial may be one that
    is never met."""
    try:
        made: Tensor = torch.as_tensor(called(ids.clone(), None if scores is None else scores + 0))
    except Exception:
        return None
    return made


def same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two answers are equal, apart from rounding."""
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.allclose(
        one.double(), other.double(), rtol=1e-4, atol=1e-6, equal_nan=True
    )


def forgets(called: Callable[..., Any], ids: Tensor, scores: Tensor | None) -> bool:
    """Whether the same questions get other answers when they are asked again in another order."""
    longer = [torch.cat([ids, ids[:, -1:].expand(-1, more)], 1) for more in range(3)]
    first = [answer(called, history, scores) for history in longer]
    again = [answer(called, history, scores) for history in reversed(longer)]
    return not all(map(same, first, reversed(again)))
