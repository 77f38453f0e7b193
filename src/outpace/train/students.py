"""From settings to what is trained: a head over a target's states, a classifier, a small model."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from outpace.errors import ConfigError, did_you_mean
from outpace.heads.base import Head, TargetShape
from outpace.heads.checkpoint import check_fits_target, load_head, read_head_kind, save_head
from outpace.heads.classifiers import find_classifier
from outpace.heads.registry import CLASSIFIERS, find_head, head_names
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.loading.source import check_path
from outpace.train.classifiers import ClassifierRecipe, classifier_student
from outpace.train.data import frequent
from outpace.train.distill import ModelRecipe, ModelStudent, Report
from outpace.train.draft_model import (
    DRAFT_MODEL,
    PRUNED,
    RANDOM,
    DraftModelSizes,
    check_of_target,
    load_start_model,
)
from outpace.train.recipe import Recipe, Student
from outpace.train.settings import TrainSettings, sizes_of
from outpace.train.teacher import Teacher


class HeadStudent(Student):
    """A head over the target's states."""

    def __init__(
        self,
        loaded: LoadedModel,
        tokens: Tensor,
        settings: TrainSettings,
        begun: Path | None = None,
    ) -> None:
        """tokens: the text, or those of it that are drafted: a new head that knows few tokens knows
        the most frequent ones. begun: the folder of the same run, where it goes on: the head that
        it began as may be gone by now."""
        self.is_pretrained = bool(settings.start)
        if settings.start:
            head = load_start_head(loaded, settings, begun)
        else:
            head = new_head(loaded, settings)
            if few := head.config.draft_vocab_size:
                head.d2t.copy_(frequent(tokens, few, loaded.vocabulary))
        self.network = self._head = head.to(loaded.device)
        self.depths, self.hidden_layers = head.config.depths, head.hidden_layers

    def recipe(self, teacher: Teacher) -> Recipe:
        if self.is_pretrained:
            self._head.unfreeze()
        else:
            self._head.init_from_lm_head(teacher.head_rows(self._head.d2t))
            self._head.init_from_embeddings(teacher)
        recipe: type[Recipe] = self._head.recipe()
        return recipe(self._head, teacher)

    def save(self, out: Path) -> None:
        save_head(self._head, out)


def new_head(loaded: LoadedModel, settings: TrainSettings) -> Head:
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


def load_start_head(
    loaded: LoadedModel, settings: TrainSettings, begun: Path | None = None
) -> Head:
    """Returns the head that training goes on from, in whichever format its folder holds it; raises
    ``ConfigError`` and ``ModelLoadError`` as `check_start` does, and for another target's head.
    begun: the folder of the same run, where it has begun: that holds a head of the same sizes."""
    folder = settings.start if begun is None else begun
    if begun is None:
        check_start(settings)
    kind = find_head(settings.method)
    if begun is None and kind.can_load_from(settings.start):
        return kind.load_from_target(loaded, settings.start).float()
    head = load_head(folder)
    _check_kind(settings, head.kind)
    check_fits_target(
        head, TargetShape.of(loaded.config, loaded.name), f"the head in {str(folder)!r}"
    )
    return head.float()


def check_start(settings: TrainSettings) -> None:
    """Raises ``ConfigError`` for sizes that are set with a head to begin as, or one of another
    kind, and ``ModelLoadError`` for a folder without a head."""
    if settings.head:
        raise ConfigError(
            f"{next(iter(settings.head))} cannot be set for a head that begins as another one: it "
            "has the sizes of that one; leave it out."
        )
    if not find_head(settings.method).can_load_from(settings.start):
        _check_kind(settings, read_head_kind(settings.start) or settings.method)


def _check_kind(settings: TrainSettings, kind: str) -> None:
    if kind != settings.method:
        raise ConfigError(
            f"the head in {settings.start!r} is of the kind {kind!r}: train that kind."
        )


def student_for(
    loaded: LoadedModel,
    tokens: Tensor,
    settings: TrainSettings,
    out: Path,
    report: Report,
    own: Tensor | None = None,
    begun: bool = False,
) -> Student:
    """Returns what the settings ask for; ``ConfigError`` for what cannot be made. tokens: the text;
    own: which of them the target has written, if that is known. out: the folder that it will be
    written to; begun: whether a run in it goes on. report: called while something takes minutes."""
    if settings.method in CLASSIFIERS:
        _check_unrounded(settings)
        return classifier_student(loaded, settings)
    if settings.method == DRAFT_MODEL:
        return ModelStudent(loaded, tokens, settings, out, report)
    drafted = tokens if own is None else tokens[own]
    return HeadStudent(loaded, drafted, settings, out if begun else None)


def check_block(loaded: LoadedModel, settings: TrainSettings) -> None:
    """Raises ``ConfigError`` for blocks that the target cannot read."""
    if settings.block > loaded.max_length:
        raise ConfigError(
            f"--block must be at most {loaded.max_length} tokens, the context of "
            f"{loaded.name}, not {settings.block}."
        )


def check_depths(settings: TrainSettings, depths: int, recipe: type[Recipe]) -> None:
    """Raises ``ConfigError`` for blocks that are too short for a drafter of such depths."""
    too_few = depths + recipe.beyond_depths - 1
    if too_few >= settings.block:
        raise ConfigError(
            f"--block must be more than {too_few} tokens for {settings.method} of these sizes."
        )


def check_made(
    loaded: LoadedModel, settings: TrainSettings, begun: bool, thorough: bool = False
) -> None:
    """Raises what `student_for` and the first step would raise for settings that do not fit the
    target, as far as that takes seconds: before hours are spent on the text.

    begun: whether all runs go on. thorough: also what takes as long as to load or to make a small
    model, which is worth it where the text is still to be written.
    """
    check_block(loaded, settings)
    if settings.method == DRAFT_MODEL:
        _check_model(loaded, settings, thorough and not begun)
    elif settings.method in CLASSIFIERS:
        if thorough:
            depths = classifier_student(loaded, settings).depths
            check_depths(settings, depths, ClassifierRecipe)
    elif not begun:
        if settings.start:
            head = load_start_head(loaded, settings)
        else:
            with torch.device("meta"):  # sizes only
                head = new_head(loaded, settings)
        check_depths(settings, head.config.depths, head.recipe())


def _check_model(loaded: LoadedModel, settings: TrainSettings, thorough: bool) -> None:
    sizes = sizes_of(DraftModelSizes, settings.head)
    check_depths(settings, sizes.depths, ModelRecipe)
    if settings.start in ("", PRUNED):
        check_of_target(loaded, sizes)
    elif thorough:
        load_start_model(loaded, settings.start, sizes)


def check_sizes(settings: TrainSettings) -> None:
    """Raises ``ConfigError`` for a method or a size that does not exist; nothing is loaded yet."""
    if settings.method == DRAFT_MODEL:
        sizes_of(DraftModelSizes, settings.head)
    elif settings.method in CLASSIFIERS:
        if not settings.draft:
            raise ConfigError(
                f"{settings.method} learns from the tokens of a draft model: name it with --draft."
            )
        _check_unrounded(settings)
        sizes_of(find_classifier(settings.method).Config, settings.head)
    elif settings.method not in head_names():
        known = [DRAFT_MODEL, *head_names(), *CLASSIFIERS]
        raise ConfigError(
            f"unknown drafter {settings.method!r}{did_you_mean(settings.method, known)}."
        )
    else:
        sizes_of(find_head(settings.method).Config, settings.head)


def _check_unrounded(settings: TrainSettings) -> None:
    """Raises ``ConfigError`` where a classifier is to be rounded."""
    if settings.quantization is not None:
        raise ConfigError(
            f"{settings.method} is never rounded: leave the drafter's quantization out."
        )


def check_begin(settings: TrainSettings) -> None:
    """Raises ``ConfigError`` or ``ModelLoadError`` for a drafter to begin as that is plainly none,
    by its folder; nothing is loaded yet."""
    if settings.method in head_names() and settings.start:
        check_start(settings)
    elif settings.method == DRAFT_MODEL and settings.start not in ("", PRUNED, RANDOM):
        check_path(settings.start)
    elif settings.draft:
        check_path(settings.draft)
