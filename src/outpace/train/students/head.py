"""Heads over the target's states, as they are trained."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from outpace.errors import ConfigError
from outpace.heads.base import Head, TargetShape
from outpace.heads.checkpoint import fit, load_head, save_head
from outpace.heads.registry import find_head
from outpace.targets.hf.loading.loaded import Loaded
from outpace.train.data import frequent
from outpace.train.marks import Recipe
from outpace.train.recipes.registry import recipe_for
from outpace.train.settings import TrainSettings, sizes_of
from outpace.train.students.base import Student
from outpace.train.teacher import Teacher


class HeadStudent(Student):
    """A head over the target's states."""

    def __init__(self, loaded: Loaded, tokens: Tensor, settings: TrainSettings) -> None:
        """tokens: the text, whose frequent tokens a new head with few of them knows."""
        self.has_learned = bool(settings.start)
        head = _learned(loaded, settings) if settings.start else _new(loaded, tokens, settings)
        self.network = self._head = head.to(loaded.device)
        self.depths, self.layers = head.config.depths, head.layers

    def recipe(self, teacher: Teacher) -> Recipe:
        if self.has_learned:
            self._head.let_learn()
        else:
            self._head.begin_from(teacher.head_rows(self._head.d2t))
            self._head.start(teacher)
        return recipe_for(self._head, teacher)

    def save(self, out: Path) -> None:
        save_head(self._head, out)


def _new(loaded: Loaded, tokens: Tensor, settings: TrainSettings) -> Head:
    """A head of new weights."""
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
    return head


def _learned(loaded: Loaded, settings: TrainSettings) -> Head:
    """The head that training goes on from, in whichever format its folder holds it."""
    what = f"the head in {settings.start!r}"
    if settings.head:
        raise ConfigError(
            f"{next(iter(settings.head))} cannot be set for a head that begins as another one: it "
            "has the sizes of that one; leave it out."
        )
    head = load_head(settings.start)
    if head.kind != settings.method:
        raise ConfigError(f"{what} is of the kind {head.kind!r}: train that kind.")
    fit(head, TargetShape.of(loaded.config, loaded.name), what)
    return head.float()
