"""From settings to what is trained."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from outpace.errors import ConfigError, did_you_mean
from outpace.heads.registry import classifier_names, find_classifier, find_head, head_names
from outpace.targets.hf.loading.loaded import Loaded
from outpace.train.draft_model import DRAFT_MODEL, DraftModelSizes
from outpace.train.pruning import Report
from outpace.train.settings import TrainSettings, sizes_of
from outpace.train.students.base import Student
from outpace.train.students.classifier import classifier_student
from outpace.train.students.head import HeadStudent
from outpace.train.students.model import ModelStudent


def student_for(
    loaded: Loaded, tokens: Tensor, settings: TrainSettings, out: Path, report: Report
) -> Student:
    """Returns what the settings ask for; ``ConfigError`` for what cannot be made. out: the folder
    that it will be written to; report: is told of what takes minutes."""
    if settings.method in classifier_names():
        if settings.quantization is not None:
            raise ConfigError(
                f"{settings.method} is never rounded: leave the drafter's quantization out."
            )
        return classifier_student(loaded, settings)
    if settings.method == DRAFT_MODEL:
        return ModelStudent(loaded, tokens, settings, out, report)
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
