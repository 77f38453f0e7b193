"""The checkpoint of a training run, and checks that a folder holds the run that is to go on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.errors import ConfigError, ModelLoadError
from outpace.heads.base import TargetShape
from outpace.heads.classifiers import ModelSignature
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.loading.lora import digest_of
from outpace.train.draft_model import PRUNED
from outpace.train.settings import TrainSettings
from outpace.train.students import check_begin
from outpace.train.teacher import signature_of

STATE, LOG = "training.pt", "training.jsonl"


def check_goes_on(out: Path, settings: TrainSettings, loaded: LoadedModel) -> None:
    """Raises what `TrainingRun` would for a folder that holds the run of another target or with
    other settings, or a state that is damaged. Reads no weights; nothing is said of the text."""
    path = out / STATE
    target = signature_of(loaded)  # a pass that all processes make, whichever of them has the file
    if path.exists():
        with reading(path):
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            check_same(out, state, settings, target, adapter_of(loaded))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Within it, a state that is not made as it should be is a ``ModelLoadError``."""
    try:
        yield
    except (ConfigError, ModelLoadError):
        raise
    except Exception as error:  # torch raises all sorts over a damaged file
        raise ModelLoadError(
            f"{path} cannot be read, so this run cannot go on: name another folder, or delete "
            "this one to begin anew."
        ) from error


def check_same(
    out: Path,
    state: Mapping[str, Any],
    settings: TrainSettings,
    target: ModelSignature,
    adapter: str | None,
    tokens: Tensor | None = None,
) -> None:
    """Raises ``ConfigError`` for a run of another target, of another text, or with other settings.
    adapter: `adapter_of` the target. tokens: the blocks of the text, if it is known."""
    mine, then = asdict(settings), dict(state["settings"])
    for one in (mine, then):  # a folder may be named in several ways, and this start as well
        one["start"] = os.path.realpath(one["start"] or PRUNED)
    other = [name for name in mine if then[name] != mine[name] and name != "steps"]
    text = state["text"]
    if not other and tokens is not None:
        other = [] if text["digest"] == digest(tokens[: text["blocks"]]) else ["text"]
    shape = TargetShape(**state["target"]["shape"])
    try:
        ModelSignature(shape, state["target"]["probe_states"]).check(target, "the run")
    except ConfigError:
        other = ["target"]
    if state["target"].get("adapter", adapter) != adapter:
        other = [*other, "adapter (--lora)"]
    if "start" in other or os.path.exists(settings.start):
        check_begin(settings)  # a folder that is none is not another one
    if other:
        raise ConfigError(
            f"{out} holds a run with another {' and '.join(sorted(_said(other)))}: name another "
            "folder, or delete this one to begin anew."
        )


def adapter_of(loaded: LoadedModel) -> str | None:
    """Returns which adapter is in a target's weights, which it may hardly change."""
    return None if loaded.lora is None else digest_of(loaded.lora)


def _said(settings: Sequence[str]) -> list[str]:
    """Settings as whoever set them knows them."""
    return ["size (--set)" if name == "head" else name for name in settings]


def digest(tokens: Tensor) -> str:
    """Returns a short text that other blocks of text do not have."""
    return hashlib.sha256(tokens.contiguous().numpy().data).hexdigest()[:16]
