"""Tiny networks that say of a token, by a model's last hidden state at it, whether it is right.

They draft nothing. A folder holds one of them with the model that it was trained for.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outpace.errors import ConfigError, ModelLoadError
from outpace.heads.base import config_of, shape_of
from outpace.heads.classifiers.origin import Origin
from outpace.heads.folder import CONFIG, Folder
from outpace.heads.registry import classifier_names, find_classifier

KIND = "outpace_classifier"
"""The entry of the configuration that holds the kind of classifier."""
WEIGHTS = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig:
    """What a classifier is built and trained with; each kind adds its own."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Classifier(nn.Module, ABC):
    """Gives the chance that a token is right, from the last hidden state at it."""

    kind: ClassVar[str]
    """Its name, which is the method's."""
    Config: ClassVar[type[ClassifierConfig]]
    greeting: Tensor

    def __init__(self, origin: Origin, config: ClassifierConfig) -> None:
        """origin: the model whose states it reads."""
        super().__init__()
        self.shape, self.config = origin.shape, config
        self.register_buffer("greeting", origin.greeting.float())

    @property
    def origin(self) -> Origin:
        """The model whose states it reads."""
        return Origin(self.shape, self.greeting)

    @abstractmethod
    def forward(self, states: Tensor) -> Tensor:
        """Returns the log-odds ``[...]`` that tokens with states ``[..., H]`` are right."""


def save_classifier(network: Classifier, folder: str | os.PathLike[str]) -> None:
    """Writes a classifier; each file is replaced at once."""
    about = {KIND: network.kind, **network.config.as_dict(), "model": asdict(network.shape)}
    Folder(Path(folder)).write(about, network.state_dict(), WEIGHTS)


def load_classifier(folder: str | os.PathLike[str], kind: str) -> Classifier:
    """Returns the classifier in a folder. Raises ``ModelLoadError`` where there is none, and
    ``ConfigError`` where it is of another kind."""
    place = Folder(Path(folder))
    about: dict[str, Any] = place.read_config()
    found = about.pop(KIND, None)
    if found not in classifier_names():
        raise ModelLoadError(
            f"{place.path} holds no classifier: its {CONFIG} is none that 'outpace train {kind}' "
            "wrote."
        )
    if found != kind:
        raise ConfigError(f"{place.path} holds a classifier {found!r}, and {kind!r} is asked for.")
    weights = place.read_weights(WEIGHTS)
    network = _built(place, kind, about, weights)
    return place.fill(network, weights)


def _built(
    place: Folder, kind: str, about: dict[str, Any], weights: Mapping[str, Tensor]
) -> Classifier:
    """The network that a configuration describes, with weights that are still to be filled in."""
    family = find_classifier(kind)
    with place.describing(kind):
        shape = shape_of(about.pop("model"))
        origin = Origin(shape, torch.empty_like(weights["greeting"]))
        network: Classifier = family(origin, config_of(family.Config, about))
    return network
