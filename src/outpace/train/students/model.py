"""Small language models, as they are trained: some layers of a larger one, or all of one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from outpace.targets.hf.loading.loaded import Loaded
from outpace.train.draft_model import PRUNED, RANDOM, DraftModelSizes, started
from outpace.train.losses import FORWARD_KL
from outpace.train.marks import Recipe
from outpace.train.pruning import Report, closest_layers, find_kept, note_kept, thinned
from outpace.train.recipes.model import ModelRecipe
from outpace.train.settings import TrainSettings, sizes_of
from outpace.train.students.base import Student
from outpace.train.teacher import Lesson, Teacher


class ModelStudent(Student):
    """A small language model with the target's tokens."""

    top = 0  # its losses look at whole distributions

    def __init__(
        self, loaded: Loaded, tokens: Tensor, settings: TrainSettings, out: Path, report: Report
    ) -> None:
        """tokens: the text, on the last piece of which layers to keep are chosen. out: the folder
        that says which ones a run to go on with has kept. report: is told how far the choice is."""
        sizes = sizes_of(DraftModelSizes, settings.head)
        start = settings.start or PRUNED
        self._start = started(loaded, start, sizes)
        self._device = loaded.device
        self._settings, self._piece, self._out, self._report = settings, tokens[-1:], out, report
        self._name = loaded.name if start == PRUNED else start
        self._wanted = 0 if start == RANDOM else sizes.layers
        if start == PRUNED and not sizes.layers:
            self._wanted = max(1, int(loaded.config.num_hidden_layers) // 4)
        self._kept: list[int] = []
        self._started_as = start
        self.has_learned = start not in (PRUNED, RANDOM)
        self.depths = sizes.depths
        if not self._wanted:
            self._begin(None)

    def recipe(self, teacher: Teacher) -> Recipe:
        if self._wanted:
            # Read in any case: of a target that is split, all processes have to make a pass.
            lesson = thinned(teacher.read(self._piece))
            known = find_kept(self._out, self._started_as, self._wanted)
            self._kept = known or self._chosen(teacher, lesson)
            self._begin(self._kept)
        return ModelRecipe(self.network, teacher, self._settings.loss, self.depths)

    def save(self, out: Path) -> None:
        self._start.save(out)
        if self._kept:
            note_kept(out, self._started_as, self._kept)

    def _begin(self, kept: Sequence[int] | None) -> None:
        self._start = self._start.to_learn(kept, self._device)
        self.network = self._start.model

    def _chosen(self, teacher: Teacher, lesson: Lesson) -> list[int]:
        """The layers with which it is close to the target from the beginning."""
        whole = self._start.model.to(self._device)  # a target's layers may be read anew, on the CPU
        recipe = ModelRecipe(whole, teacher, FORWARD_KL, self.depths)
        # Products of blocks have a precision of their own.
        mixed = self._start.file is None and self._settings.is_mixed(self._device)
        kind = self._device.type

        @torch.no_grad()
        def distance() -> float:
            with torch.autocast(kind, torch.bfloat16, enabled=mixed):
                return float(recipe.mark(lesson).loss)

        return closest_layers(whole, self._wanted, self._name, distance, self._report)
