"""What is trained, with all that a run needs to know of it: a head, a classifier, a small model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from outpace.train.marks import Recipe
from outpace.train.measures import AcceptanceLength, Measure
from outpace.train.teacher import TOP, Teacher


class Student(ABC):
    """A network that learns from a target."""

    network: nn.Module
    depths: int
    """Tokens behind the root by which it is marked."""
    layers: tuple[int, ...] = (-1,)
    """The target's layers whose states it is shown."""
    top: int = TOP
    """How many of the target's likeliest tokens it is shown."""

    has_learned: bool = False
    """Whether it begins as a drafter that has learned before."""
    drafts: bool = True
    """Whether it foresees the target's tokens; if not, all of a text is the same to it."""
    measure: Measure = AcceptanceLength()
    """The figure by which its checkpoints are compared."""

    def read(self, teacher: Teacher, tokens: Tensor) -> Any:
        """Returns the lesson that is to be learned from blocks of text ``[B, T]``."""
        return teacher.read(tokens)

    @abstractmethod
    def recipe(self, teacher: Teacher) -> Recipe:
        """Returns how it is trained, and makes it ready to begin."""

    @abstractmethod
    def save(self, out: Path) -> None:
        """Writes what ``--draft`` takes. Each file is replaced at once."""
