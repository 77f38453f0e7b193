"""Heads over the target's states, as they are trained."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from outpace.errors import ConfigError
from outpace.heads.base import Head, TargetShape
from outpace.heads.checkpoint import fit, load_head, read_kind, save_head
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

    def __init__(
        self, loaded: Loaded, tokens: Tensor, settings: TrainSettings, begun: Path | None = None
    ) -> None:
        """tokens: the text, or those of it that are drafted: a new head that knows few tokens knows
        the most frequent ones. begun: the folder of the same run, where it goes on: the head that
        it began as may be gone by now."""
        self.has_learned = bool(settings.start)
        if settings.start:
            head = learned_head(loaded, settings, begun)
        else:
            head = new_head(loaded, settings)
            if few := head.config.draft_vocab_size:
                head.d2t.copy_(frequent(tokens, few, loaded.vocabulary))
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


def new_head(loaded: Loaded, settings: TrainSettings) -> Head:
    """Returns a head of new weights; ``ConfigError`` for sizes that do not go together."""
    kind = find_head(settings.method)
    config = sizes_of(kind.Config, settings.head)
    if config.draft_vocab_size > loaded.vocabulary:
        raise ConfigError(
            f"draft_vocab_size {config.draft_vocab_size} is more than the {loaded.vocabulary} "
            "tokens of the target."
        )
    try:
        found: Head = kind(TargetShape.of(loaded.config, loaded.name), config)
    except ValueError as error:
        raise ConfigError(f"no head of these sizes can be made: {error}.") from error
    return found


def learned_head(loaded: Loaded, settings: TrainSettings, begun: Path | None = None) -> Head:
    """Returns the head that training goes on from, in whichever format its folder holds it; raises
    ``ConfigError`` and ``ModelLoadError`` as `check_start` does, and for another target's head.
    begun: the folder of the same run, where it has begun: that holds a head of the same sizes."""
    folder = settings.start if begun is None else begun
    if begun is None:
        check_start(settings)
    head = load_head(folder)
    _check_kind(settings, head.kind)
    fit(head, TargetShape.of(loaded.config, loaded.name), f"the head in {str(folder)!r}")
    return head.float()


def check_start(settings: TrainSettings) -> None:
    """Raises ``ConfigError`` for sizes that are set beside a head to begin as, or one of another
    kind, and ``ModelLoadError`` for a folder without a head."""
    if settings.head:
        raise ConfigError(
            f"{next(iter(settings.head))} cannot be set for a head that begins as another one: it "
            "has the sizes of that one; leave it out."
        )
    _check_kind(settings, read_kind(settings.start) or settings.method)


def _check_kind(settings: TrainSettings, kind: str) -> None:
    if kind != settings.method:
        raise ConfigError(
            f"the head in {settings.start!r} is of the kind {kind!r}: train that kind."
        )
