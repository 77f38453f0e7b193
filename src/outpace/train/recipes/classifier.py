"""How classifiers of drafted tokens are trained: weighted logistic regression on their states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from outpace.heads.classifiers.base import Classifier
from outpace.train.marks import Marks, Recipe


@dataclass(frozen=True, eq=False)
class Examples:
    """P drafted tokens, and how right each of them is."""

    states: Tensor  # [P, H], the last hidden states at them
    right: Tensor  # [P] in [0, 1]
    if_right: float
    """How much a token that is right counts."""
    if_wrong: float


class ClassifierRecipe(Recipe):
    """Marks a classifier on drafted tokens."""

    def __init__(self, network: Classifier) -> None:
        self._network = network

    def mark(self, lesson: Examples) -> Marks:
        odds = self._network(lesson.states.float())  # [P]
        right = lesson.right
        gained = lesson.if_right * right * logsigmoid(odds)
        lost = lesson.if_wrong * (1 - right) * logsigmoid(-odds)
        # Weights move all odds: a token is called right where they are above those of the mean one.
        usual = lesson.if_right * right.sum() / (lesson.if_wrong * (1 - right).sum())
        return Marks(-(gained + lost).sum(), _recognised(odds > usual.log(), right > 0.5))


def _recognised(said: Tensor, right: Tensor) -> Tensor:
    """``[P, 2]``: 1 where a token is recognised and 0 where it is not. A token that is right has
    that in the first column and NaN in the second; one that is wrong, the other way round."""
    same = (said == right).double()
    columns = [same.where(kind, torch.nan) for kind in (right, ~right)]
    return torch.stack(columns, -1)
