"""The stopping criteria of a transformers ``generate`` call, for one row at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from outpace.core.faults import name_of
from outpace.errors import ConfigError
from outpace.targets.hf.generating.processors import (
    AsGenerate,
    answer,
    apart,
    described,
    forgets,
    same,
)

Criterion = Callable[[Tensor, Any], Any]

OF_THE_ENGINE = (MaxLengthCriteria, EosTokenCriteria)
"""Criteria that the engine has itself, as a request's ``max_tokens`` and ``eos_ids``."""


def check(criteria: Sequence[Criterion], ids: Tensor) -> None:
    """Raises ``ConfigError`` for a criterion that does not judge a row by its tokens alone.

    Criteria of transformers are known to do that. Others are tried out on a copy.

    ids: ``[B, T]``, the prompts of all rows.
    """
    for criterion in criteria:
        if type(criterion).__module__.startswith("transformers."):
            continue
        reason = _fault(criterion, ids)
        if reason is not None:
            raise ConfigError(
                f"stopping criterion {name_of(criterion)} {reason}: make it depend on nothing but "
                "the tokens of the row that it is given, or drop custom_generate."
            )


def _fault(criterion: Criterion, ids: Tensor) -> str | None:
    """Returns what shows that the criterion cannot be called for one row alone, or again."""
    trial = apart(criterion)
    if trial is None:
        return None
    if forgets(trial, ids[:1], None):
        return "gives another answer when it is called again"
    alone = [answer(trial, row[None], None) for row in ids]
    for made in alone:
        if made is not None and made.numel() != 1:
            return f"answers one row with {made.numel()} values"
    batch = answer(trial, ids, None)
    if batch is None:
        return None
    batch = batch.expand(len(ids)) if batch.numel() == 1 else batch
    ends = [None if made is None else made.reshape(()) for made in alone]
    if len(batch) == len(ids) and all(map(same, ends, batch)):
        return None
    return "treats a row of a batch otherwise than the same row alone"


@dataclass(frozen=True, eq=False)
class RowCriteria:
    """Whether a row's text ends, by all criteria that the engine does not have itself."""

    criteria: Sequence[Criterion]
    view: AsGenerate

    def __call__(self, ids: list[int]) -> bool:
        """Returns whether one of them ends the text. ids: the row, without padding."""
        shown = self.view(torch.tensor([ids]))
        return any(self._ends(criterion, shown) for criterion in self.criteria)

    @staticmethod
    def _ends(criterion: Criterion, shown: Tensor) -> bool:
        made = criterion(shown, None)
        if torch.as_tensor(made).numel() != 1:
            raise ConfigError(
                f"stopping criterion {name_of(criterion)} answered one row with {described(made)}: "
                "make it return one value for the row that it is given."
            )
        return bool(made)
