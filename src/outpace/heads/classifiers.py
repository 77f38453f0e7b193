"""Tiny networks that say of a token, by a model's last hidden state at it, whether it is right.

They draft nothing. A folder holds one of them with the model that it was trained for.
"""

from __future__ import annotations

import os
import pickle
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outpace.core.values import shown
from outpace.errors import ConfigError, ModelLoadError
from outpace.files import replacing
from outpace.heads.base import ResidualBlock, TargetShape, parse_config, parse_target_shape
from outpace.heads.folder import CONFIG, WEIGHTS, HeadFolder
from outpace.heads.registry import CLASSIFIERS

# -- which model a classifier was trained for ------------------------------------------------------


MIN_COSINE = 0.9
"""Least mean cosine of two models' probe states. Rounding a model's weights moves its states by a
small part of their length; two models that began apart have no direction in common."""


@dataclass(frozen=True, eq=False)
class ModelSignature:
    """A model, as far as it can be recognised by what is kept with a classifier."""

    shape: TargetShape
    probe_states: Tensor  # [T, H], its last hidden states in a fixed text

    def check_shape(self, here: TargetShape, what: str) -> None:
        """Raises ``ConfigError`` where a model of another shape is meant. what: the classifier, for
        the sentence."""
        for size in ("hidden_size", "vocab_size", "layers"):
            made_for, found = getattr(self.shape, size), getattr(here, size)
            if made_for != found:
                raise ConfigError(
                    f"{what} was trained for another model ({self.shape.name or 'unnamed'}): its "
                    f"{size} is {made_for}, and that of {here.name or 'this one'} is {found}; "
                    "train one for this."
                )

    def check(self, here: ModelSignature, what: str) -> None:
        """Raises ``ConfigError`` where ``here`` is another model than this. what: the classifier,
        for the sentence."""
        self.check_shape(here.shape, what)
        name = self.shape.name or "unnamed"
        pair = self.probe_states.double().cpu(), here.probe_states.double().cpu()
        alike = float(torch.cosine_similarity(*pair, dim=-1).mean())
        if not alike >= MIN_COSINE:
            raise ConfigError(
                f"{what} was trained for another model ({name}) of the same shape: the hidden "
                f"states of {here.shape.name or 'this one'} have nothing to do with those that it "
                f"reads (cosine {alike:.2f}); train one for this model."
            )


# -- what classifiers have in common ---------------------------------------------------------------


KIND = "outpace_classifier"
"""The entry of the configuration that holds the kind of classifier."""


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig:
    """What a classifier is built and trained with; each kind adds its own."""


class Classifier(nn.Module, ABC):
    """Gives the chance that a token is right, from the last hidden state at it."""

    kind: ClassVar[str]
    """Its name, which is the method's."""
    Config: ClassVar[type[ClassifierConfig]]
    probe_states: Tensor

    def __init__(self, model_signature: ModelSignature, config: ClassifierConfig) -> None:
        """model_signature: the model whose states it reads."""
        super().__init__()
        self.shape, self.config = model_signature.shape, config
        self.register_buffer("probe_states", model_signature.probe_states.float())

    @property
    def model_signature(self) -> ModelSignature:
        """The model whose states it reads."""
        return ModelSignature(self.shape, self.probe_states)

    @abstractmethod
    def forward(self, states: Tensor) -> Tensor:
        """Returns the log-odds ``[...]`` that tokens with states ``[..., H]`` are right."""


def save_classifier(network: Classifier, folder: str | os.PathLike[str]) -> None:
    """Writes a classifier; each file is replaced at once."""
    about = {KIND: network.kind, **asdict(network.config), "model": asdict(network.shape)}
    HeadFolder(Path(folder)).write(about, network.state_dict(), WEIGHTS)


def load_classifier(folder: str | os.PathLike[str], kind: str) -> Classifier:
    """Returns the classifier in a folder. Raises ``ModelLoadError`` where there is none, and
    ``ConfigError`` where it is of another kind."""
    place = HeadFolder(Path(folder))
    about: dict[str, Any] = place.read_config()
    found = about.pop(KIND, None)
    if found not in CLASSIFIERS:
        raise ModelLoadError(
            f"{place.path} holds no classifier: its {CONFIG} is none that 'outpace train {kind}' "
            "wrote."
        )
    if found != kind:
        raise ConfigError(f"{place.path} holds a classifier {found!r}, and {kind!r} is asked for.")
    weights = place.read_weights(WEIGHTS)
    network = _built(place, kind, about, weights)
    return place.fill(network, weights)


def find_classifier(kind: str) -> type[Classifier]:
    """Returns the classifier of one of these names."""
    return {each.kind: each for each in (Judge, AcceptancePredictionHead)}[kind]


def _built(
    place: HeadFolder, kind: str, about: dict[str, Any], weights: Mapping[str, Tensor]
) -> Classifier:
    """The network that a configuration describes, with weights that are still to be filled in."""
    family = find_classifier(kind)
    with place.describing(kind):
        shape = parse_target_shape(about.pop("model"))
        model_signature = ModelSignature(shape, torch.empty_like(weights["probe_states"]))
        network: Classifier = family(model_signature, parse_config(family.Config, about))
    return network


# -- the judge -------------------------------------------------------------------------------------

# The judge: one linear map from the target's state at a drafted token.
#
# Bachmann et al. 2025, "Judge decoding: faster speculative sampling requires going beyond model
# alignment" (arXiv 2501.19309).


@dataclass(frozen=True, kw_only=True)
class JudgeConfig(ClassifierConfig):
    """What a judge is trained with."""

    window: int = 4
    """Places after a drafted token at which the target has to say what it would have said without
    it, so that the token counts as right."""
    greedy: bool = False
    """Whether it learns from the draft model's likeliest tokens only, and not from drawn ones."""


class Judge(Classifier):
    """``w . h + b``: the log-odds that a token is right as it is."""

    kind: ClassVar[str] = "judge"
    Config: ClassVar[type[ClassifierConfig]] = JudgeConfig

    def __init__(self, model_signature: ModelSignature, config: JudgeConfig) -> None:
        super().__init__(model_signature, config)
        if not config.window:
            raise ValueError("window is 0: the target has to say one word at least")
        self.linear = nn.Linear(model_signature.shape.hidden_size, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states: Tensor) -> Tensor:
        """states: ``[..., H]`` -> ``[...]``."""
        found: Tensor = self.linear(states)[..., 0]
        return found


@dataclass(frozen=True, eq=False)
class JudgeHead:
    """sigmoid(weight . h + bias): how likely a token with target state h is right as it is."""

    weight: Tensor  # [H]
    bias: float = 0.0
    model_signature: ModelSignature | None = None
    """The target that it was trained for, where that is known."""

    def __post_init__(self) -> None:
        if not isinstance(self.weight, Tensor) or self.weight.dim() != 1:
            raise ConfigError(
                "the weight of a JudgeHead must be a tensor of one dimension, with a number for "
                f"each of a target's hidden state, not {shown(self.weight)}."
            )

    def score(self, embedding: Tensor) -> Tensor:
        """Returns ``[...]`` in (0, 1). embedding: ``[..., H]``."""
        if len(self.weight) != embedding.shape[-1]:
            raise ConfigError(
                f"the judge reads hidden states of {len(self.weight)} numbers, and those of this "
                f"target have {embedding.shape[-1]}: give a head for this target."
            )
        weight = self.weight.to(embedding)
        return torch.sigmoid((embedding @ weight).double() + self.bias)

    def save(self, path: str) -> None:
        """Writes the head to a file that `load` reads."""
        with replacing(Path(path)) as part:
            torch.save({"weight": self.weight, "bias": self.bias}, part)

    @classmethod
    def load(cls, path: str) -> JudgeHead:
        """Returns the head that ``outpace train judge`` wrote to a folder or `save` to a file;
        ``ConfigError`` if there is none."""
        if Path(path).is_dir():
            return cls.of(load_classifier(path, Judge.kind))
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
            return cls(found["weight"], float(found["bias"]))
        # torch raises all but the first two for files that are empty, cut off or of another kind.
        except (
            OSError,
            ValueError,
            EOFError,
            LookupError,
            RuntimeError,
            TypeError,
            pickle.UnpicklingError,
        ) as error:
            raise ConfigError(
                f"no judge head in {path!r}: train one with 'outpace train judge'."
            ) from error

    @classmethod
    def of(cls, network: Classifier) -> JudgeHead:
        """Returns a trained judge as it is used."""
        assert isinstance(network, Judge)
        linear = network.linear
        return cls(linear.weight.detach()[0], float(linear.bias.detach()), network.model_signature)


# -- the acceptance prediction head ----------------------------------------------------------------

# SpecDec++'s "acceptance prediction head" over the draft model's states: what `outpace train
# stop_head` trains and the length policy "stop_head" reads.
#
# Huang et al. 2024, "SpecDec++: boosting speculative decoding via adaptive candidate lengths"
# (arXiv 2405.19715).


@dataclass(frozen=True, kw_only=True)
class AcceptancePredictionConfig(ClassifierConfig):
    """What an acceptance prediction head is built and trained with."""

    blocks: int = 3
    """Residual blocks before the output."""
    rejection_weight: int = 6
    """How many times as much a rejection counts as an acceptance, so that the chances that it gives
    are on the careful side."""
    every: int = 7
    """One token in n of the text is replaced by one that the draft model draws."""
    greedy: bool = False
    """Whether it is for greedy texts: both models' likeliest tokens, in place of their
    distributions."""


class AcceptancePredictionHead(Classifier):
    """Residual blocks and one linear map: the log-odds that a drafted token is accepted."""

    kind: ClassVar[str] = "stop_head"
    Config: ClassVar[type[ClassifierConfig]] = AcceptancePredictionConfig

    def __init__(self, model_signature: ModelSignature, config: AcceptancePredictionConfig) -> None:
        super().__init__(model_signature, config)
        if not (config.rejection_weight and config.every):
            raise ValueError("rejection_weight and every are whole numbers of at least 1")
        width = model_signature.shape.hidden_size
        self.blocks = nn.Sequential(*(ResidualBlock(width) for _ in range(config.blocks)))
        self.linear = nn.Linear(width, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states: Tensor) -> Tensor:
        """states: ``[..., H]`` -> ``[...]``."""
        found: Tensor = self.linear(self.blocks(states))[..., 0]
        return found
