"""The judge: one linear map from the target's state at a drafted token.

Bachmann et al. 2025, "Judge decoding: faster speculative sampling requires going beyond model
alignment" (arXiv 2501.19309).
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from outpace.core.values import shown
from outpace.errors import ConfigError
from outpace.heads.classifiers.base import Classifier, ClassifierConfig, load_classifier
from outpace.heads.classifiers.origin import Origin


@dataclass(frozen=True, kw_only=True)
class JudgeConfig(ClassifierConfig):
    """What a judge is trained with."""

    window: int = 4
    """Places behind a drafted token at which the target has to say what it would have said without
    it, so that the token counts as right."""
    greedy: bool = False
    """Whether it learns from the draft model's likeliest tokens only, and not from drawn ones."""


class Judge(Classifier):
    """``w . h + b``: the log-odds that a token is right as it is."""

    kind: ClassVar[str] = "judge"
    Config: ClassVar[type[ClassifierConfig]] = JudgeConfig

    def __init__(self, origin: Origin, config: JudgeConfig) -> None:
        super().__init__(origin, config)
        if not config.window:
            raise ValueError("window is 0: the target has to say one word at least")
        self.window = config.window
        self.linear = nn.Linear(origin.shape.hidden_size, 1)
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
    origin: Origin | None = None
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
        torch.save({"weight": self.weight, "bias": self.bias}, path)

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
        return cls(linear.weight.detach()[0], float(linear.bias.detach()), network.origin)
