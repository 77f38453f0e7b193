"""What is trained, with all that a run needs to know of it: a head, a classifier, a small model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from outpace.errors import ConfigError, did_you_mean
from outpace.heads.base import Head, TargetShape
from outpace.heads.checkpoint import save_head
from outpace.heads.registry import classifier_names, find_classifier, find_head, head_names
from outpace.targets.hf.loading.loaded import Loaded
from outpace.train.data import frequent
from outpace.train.draft_model import DRAFT_MODEL, DraftModelSizes, started
from outpace.train.marks import Recipe
from outpace.train.measures import AcceptanceLength, Measure
from outpace.train.recipes.model import ModelRecipe
from outpace.train.recipes.registry import recipe_for
from outpace.train.settings import TrainSettings, sizes_of
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


class HeadStudent(Student):
    """A head over the target's states."""

    def __init__(self, loaded: Loaded, tokens: Tensor, settings: TrainSettings) -> None:
        """tokens: the text, whose frequent tokens a head with few of them knows."""
        kind = find_head(settings.method)
        config = sizes_of(kind.Config, settings.head)
        if config.draft_vocab_size > loaded.vocabulary:
            raise ConfigError(
                f"draft_vocab_size {config.draft_vocab_size} is more than the {loaded.vocabulary} "
                "tokens of the target."
            )
        try:
            head: Head = kind(TargetShape.of(loaded.config, loaded.name), config)
        except ValueError as error:
            raise ConfigError(f"no head of these sizes can be made: {error}.") from error
        if config.draft_vocab_size:
            head.d2t.copy_(frequent(tokens, config.draft_vocab_size, loaded.vocabulary))
        self.network = self._head = head.to(loaded.device)
        self.depths, self.layers = config.depths, head.layers

    def recipe(self, teacher: Teacher) -> Recipe:
        self._head.begin_from(teacher.head_rows(self._head.d2t))
        self._head.start(teacher)
        return recipe_for(self._head, teacher)

    def save(self, out: Path) -> None:
        save_head(self._head, out)


class ModelStudent(Student):
    """A small language model with the target's tokens."""

    top = 0  # its losses look at whole laws

    def __init__(self, loaded: Loaded, settings: TrainSettings) -> None:
        sizes = sizes_of(DraftModelSizes, settings.head)
        self._start = started(loaded, settings.start, sizes)
        self._loss = settings.loss
        self.network, self.depths = self._start.model, sizes.depths

    def recipe(self, teacher: Teacher) -> Recipe:
        return ModelRecipe(self.network, teacher, self._loss, self.depths)

    def save(self, out: Path) -> None:
        self._start.save(out)


def student_for(loaded: Loaded, tokens: Tensor, settings: TrainSettings) -> Student:
    """Returns what the settings ask for; ``ConfigError`` for what cannot be made."""
    if settings.method in classifier_names():
        # Not imported above: it builds on what is here.
        from outpace.train.students.classifier import classifier_student

        return classifier_student(loaded, settings)
    if settings.method == DRAFT_MODEL:
        return ModelStudent(loaded, settings)
    return HeadStudent(loaded, tokens, settings)


def check_sizes(settings: TrainSettings) -> None:
    """Raises ``ConfigError`` for a method or a size that does not exist: nothing is loaded yet."""
    if settings.method == DRAFT_MODEL:
        sizes_of(DraftModelSizes, settings.head)
    elif settings.method in classifier_names():
        if not settings.draft:
            raise ConfigError(
                f"{settings.method} learns from the tokens of a draft model: name it with --draft."
            )
        sizes_of(find_classifier(settings.method).Config, settings.head)
    elif settings.method not in head_names():
        known = [DRAFT_MODEL, *head_names(), *classifier_names()]
        raise ConfigError(
            f"unknown drafter {settings.method!r}{did_you_mean(settings.method, known)}."
        )
    else:
        sizes_of(find_head(settings.method).Config, settings.head)
