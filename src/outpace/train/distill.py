"""Distillation of the target into a small language model (DistillSpec, Zhou et al. 2023, arXiv
2310.08461), and the choice of the layers of a larger one that it begins with.

A model without some of its layers still says much of what it said, if they are the right ones. In
each turn that layer is left out without which the model stays closest to the target, on a piece of
text. Layers that change the states least (Men et al. 2024, ShortGPT, arXiv 2403.03853) take one
pass to find, but some of them are needed all the same; lab/measure/pruned_layers.py compares the
ways.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outpace.files import replacing
from outpace.heads.folder import saving
from outpace.targets.base import SubLayers
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.partial.layers import decoder_layers, skip_sublayers
from outpace.train.draft_model import (
    PRUNED,
    RANDOM,
    DraftModelSizes,
    check_layers,
    check_prunable,
    load_start_model,
)
from outpace.train.losses import FORWARD_KL, chunked_loss, find_loss
from outpace.train.recipe import LossOutput, Recipe, Student
from outpace.train.settings import TrainSettings, sizes_of
from outpace.train.teacher import AT_ONCE, LMHead, Teacher, TeacherBatch


class ModelRecipe(Recipe):
    """The loss of a model that reads the same text as the target, at every place of it from which
    there is something to learn.

    Distributions are made for a few places at once and thrown away: those of a whole batch over a
    large vocabulary would take more memory than both models (`losses.chunked_loss`).
    """

    def __init__(self, model: nn.Module, teacher: Teacher, loss: str, depths: int) -> None:
        """depths: tokens after the root by which drafts are simulated."""
        self._model: Any = model
        self._teacher, self._depths = teacher, depths
        self._distance = find_loss(loss)
        self._lm_head = LMHead(model, _text_config(model), "the drafter")

    def compute_loss(self, batch: TeacherBatch) -> LossOutput:
        output = self._model(
            input_ids=batch.tokens, use_cache=False, output_hidden_states=True, logits_to_keep=1
        )
        places = torch.ones_like(batch.tokens, dtype=torch.bool)
        places = places if batch.learned is None else batch.learned
        own, theirs = output.hidden_states[-1][places], batch.hidden_states[places]  # [P, H]
        loss, same = chunked_loss(self._chunk_loss, own, theirs, AT_ONCE, self._lm_head.learns)
        right = torch.zeros_like(places)
        right[places] = same
        return LossOutput(loss / batch.count(), self._drafts(right))

    def _chunk_loss(self, own: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sum of the losses at P places, and ``[P]`` at which of them the model's first
        guess is the target's. own, theirs: ``[P, H]``, the last states of model and target."""
        p = self._teacher.logits(theirs)
        q = self._lm_head(own)[..., : p.shape[-1]].float()
        loss = self._distance(p.log_softmax(-1), q.log_softmax(-1)).sum()
        return loss, p.argmax(-1) == q.argmax(-1)

    def _drafts(self, right: Tensor) -> Tensor:
        """Returns ``[B, T - D, D]``: whether each token of the draft after each root is right, by
        root and depth. right: ``[B, T]``, whether the guess after each token is."""
        return right[:, 1:].unfold(1, self._depths, 1)


class LikeliestRecipe(Recipe):
    """The loss of a model by the likeliest tokens of the target's distributions, at the places that
    have
    any: what is kept of texts that were written with the model's drafts."""

    def __init__(self, model: nn.Module, vocabulary: int) -> None:
        """vocabulary: tokens that the model has; the first ones of the target's."""
        self._model: Any = model
        self._vocabulary = vocabulary

    def compute_loss(self, batch: TeacherBatch) -> LossOutput:
        own = batch.top_tokens < self._vocabulary
        chances = torch.where(own, batch.top_chances, 0.0)
        known = (
            (batch.tokens < self._vocabulary).cumprod(-1).bool()
        )  # [B, T], up to another's token
        where = known & (chances.sum(-1) > 0)
        tokens = batch.tokens.where(known, 0)
        logits = self._model(input_ids=tokens, use_cache=False).logits[where].float()
        likeliest = batch.top_tokens[where].clamp_max(self._vocabulary - 1)  # [P, TOP]
        found = logits.log_softmax(-1).gather(-1, likeliest)
        hits = logits.argmax(-1) == likeliest[:, 0]
        loss = -(chances[where] * found).sum() / max(1, len(found))
        return LossOutput(loss, hits[None, :, None])


def _text_config(model: Any) -> Any:
    return model.config.get_text_config()


class ModelStudent(Student):
    """A small language model with the target's tokens."""

    top = 0  # its losses look at whole distributions

    def __init__(
        self,
        loaded: LoadedModel,
        tokens: Tensor,
        settings: TrainSettings,
        out: Path,
        report: Report,
    ) -> None:
        """tokens: the text, on the last piece of which layers to keep are chosen. out: the folder
        that says which ones a run to go on with has kept. report: called while it goes on."""
        sizes = sizes_of(DraftModelSizes, settings.head)
        start = settings.start or PRUNED
        self._start = load_start_model(loaded, start, sizes)
        self._device = loaded.device
        self._settings, self._piece, self._out, self._report = settings, tokens[-1:], out, report
        self._name = loaded.name if start == PRUNED else start
        self._wanted = 0 if start == RANDOM else sizes.layers
        if start == PRUNED and not sizes.layers:
            self._wanted = max(1, int(loaded.config.num_hidden_layers) // 4)
        self._kept: list[int] = []
        self._started_as = start
        self.is_pretrained = start not in (PRUNED, RANDOM)
        self.depths = sizes.depths
        if not self._wanted:
            self._begin(None)

    def recipe(self, teacher: Teacher) -> Recipe:
        if self._wanted:
            # Read in any case: of a target that is split, all processes have to make a pass.
            batch = subsample_batch(teacher.read(self._piece))
            known = load_kept_layers(self._out, self._started_as, self._wanted)
            if not known and self._start.file is None:
                # Before it is measured which ones should be kept. Others may be refused later.
                count = int(_text_config(self._start.model).num_hidden_layers)
                check_prunable(self._start.model, range(count - self._wanted, count))
            self._kept = known or self._chosen(teacher, batch)
            self._begin(self._kept)
        return ModelRecipe(self.network, teacher, self._settings.loss, self.depths)

    def save(self, out: Path) -> None:
        self._start.save(out)
        if self._kept:
            save_kept_layers(out, self._started_as, self._kept)

    def _begin(self, kept: Sequence[int] | None) -> None:
        self._start = self._start.to_trainable(kept, self._device)
        self.network = self._start.model

    def _chosen(self, teacher: Teacher, batch: TeacherBatch) -> list[int]:
        """The layers with which it is close to the target from the beginning."""
        whole = self._start.model.to(self._device)  # a target's layers may be read anew, on the CPU
        recipe = ModelRecipe(whole, teacher, FORWARD_KL, self.depths)
        # Products of blocks have a precision of their own.
        mixed = self._start.file is None and self._settings.is_mixed(self._device)
        kind = self._device.type

        @torch.no_grad()
        def distance() -> float:
            with torch.autocast(kind, torch.bfloat16, enabled=mixed):
                return float(recipe.compute_loss(batch).loss)

        return closest_layers(whole, self._wanted, self._name, distance, self._report)


# -- which layers are kept -------------------------------------------------------------------------


KEPT_LAYERS_FILE = "layers.json"
"""The file that says, next to a model that learns, which layers it began with."""

PLACES = 128
"""Places of a text at which a model is compared with the target."""

Distance = Callable[[], float]
"""How far a model is from the target as it is now, with some of its layers left out."""

Report = Callable[[str, float], None]
"""Called with what is being done, and the share of it that is done."""


def closest_layers(
    model: nn.Module, wanted: int, name: str, distance: Distance, report: Report
) -> list[int]:
    """Returns the numbers of ``wanted`` layers of a model, in order, with which it stays close to
    the target. The model itself is not changed.

    name: what users call it. Raises ``ConfigError`` where it has fewer.
    """
    count = len(decoder_layers(model))
    check_layers(wanted, count, name)
    out: set[int] = set()
    trials = sum(range(wanted + 1, count + 1))
    done = 0
    if trials:
        report("which layers to keep", 0.0)
    while len(out) < count - wanted:
        found = {}
        for layer in set(range(count)) - out:
            with skip_sublayers(model, SubLayers.of_layers({*out, layer})):
                found[layer] = distance()
            done += 1
            report("which layers to keep", done / trials)
        out.add(min(found, key=lambda layer: (found[layer], layer)))
    return sorted(set(range(count)) - out)


def subsample_batch(batch: TeacherBatch) -> TeacherBatch:
    """Returns a batch of which only `PLACES` places count, evenly spaced: distributions over a
    large vocabulary take longer than the layers do."""
    rows, length = batch.tokens.shape
    numbers = torch.linspace(0, rows * length - 1, min(PLACES, rows * length)).round().long()
    learned = torch.zeros(rows * length, dtype=torch.bool)
    learned[numbers] = True
    own: Tensor = learned.view(rows, length).to(batch.tokens.device)
    return TeacherBatch(batch.tokens, batch.hidden_states, batch.top_tokens, batch.top_chances, own)


def load_kept_layers(out: Path, start: str, wanted: int) -> list[int] | None:
    """Returns the layers that a run in this folder began with, if it kept as many of this start."""
    try:
        found = json.loads((out / KEPT_LAYERS_FILE).read_text(encoding="utf-8"))
        known = found["start"] == start and len(found["kept"]) == wanted
        return [int(layer) for layer in found["kept"]] if known else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save_kept_layers(out: Path, start: str, kept: list[int]) -> None:
    """Writes which layers a run begins with: the same ones when it goes on."""
    out.mkdir(parents=True, exist_ok=True)
    with saving(out / KEPT_LAYERS_FILE), replacing(out / KEPT_LAYERS_FILE) as part:
        part.write_text(json.dumps({"start": start, "kept": kept}) + "\n", encoding="utf-8")
