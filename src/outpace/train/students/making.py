"""From settings to what is trained."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from outpace.errors import ConfigError, did_you_mean
from outpace.heads.registry import classifier_names, find_classifier, find_head, head_names
from outpace.targets.hf.loading.loaded import Loaded
from outpace.targets.hf.loading.source import check_path
from outpace.train.draft_model import DRAFT_MODEL, PRUNED, RANDOM, DraftModelSizes
from outpace.train.marks import Recipe
from outpace.train.pruning import Report
from outpace.train.recipes.model import ModelRecipe
from outpace.train.recipes.registry import recipe_kind
from outpace.train.settings import TrainSettings, sizes_of
from outpace.train.students.base import Student
from outpace.train.students.classifier import classifier_student
from outpace.train.students.head import HeadStudent, check_start, learned_head, new_head
from outpace.train.students.model import ModelStudent


def student_for(
    loaded: Loaded,
    tokens: Tensor,
    settings: TrainSettings,
    out: Path,
    report: Report,
    own: Tensor | None = None,
    begun: bool = False,
) -> Student:
    """Returns what the settings ask for; ``ConfigError`` for what cannot be made. tokens: the text;
    own: which of them the target has written, if that is known. out: the folder that it will be
    written to; begun: whether a run in it goes on. report: is told of what takes minutes."""
    if settings.method in classifier_names():
        if settings.quantization is not None:
            raise ConfigError(
                f"{settings.method} is never rounded: leave the drafter's quantization out."
            )
        return classifier_student(loaded, settings)
    if settings.method == DRAFT_MODEL:
        return ModelStudent(loaded, tokens, settings, out, report)
    drafted = tokens if own is None else tokens[own]
    return HeadStudent(loaded, drafted, settings, out if begun else None)


def check_block(loaded: Loaded, settings: TrainSettings) -> None:
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


def check_made(loaded: Loaded, settings: TrainSettings, begun: bool) -> None:
    """Raises what `student_for` and the first step would raise for settings that do not fit the
    target, as far as that takes seconds: before hours are spent on the text."""
    check_block(loaded, settings)
    if settings.method == DRAFT_MODEL:
        check_depths(settings, sizes_of(DraftModelSizes, settings.head).depths, ModelRecipe)
    if settings.method not in head_names() or begun:
        return
    if settings.start:
        head = learned_head(loaded, settings)
    else:
        with torch.device("meta"):  # sizes only
            head = new_head(loaded, settings)
    check_depths(settings, head.config.depths, recipe_kind(head))


def check_sizes(settings: TrainSettings) -> None:
    """Raises ``ConfigError`` for a method or a size that does not exist; nothing is loaded yet."""
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


def check_begin(settings: TrainSettings) -> None:
    """Raises ``ConfigError`` or ``ModelLoadError`` for a drafter to begin as that is plainly none,
    by its folder; nothing is loaded yet."""
    if settings.method in head_names() and settings.start:
        check_start(settings)
    elif settings.method == DRAFT_MODEL and settings.start not in ("", PRUNED, RANDOM):
        check_path(settings.start)
