"""Which model a classifier was trained for, so that it is used with that model only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.errors import ConfigError
from outpace.heads.base import TargetShape

ALIKE = 0.9
"""Least mean cosine of two models' greetings. Rounding a model's weights moves its states by a
small part of their length; two models that began apart have no direction in common."""


@dataclass(frozen=True, eq=False)
class Origin:
    """A model, as far as it can be recognised by what is kept beside a classifier."""

    shape: TargetShape
    greeting: Tensor  # [T, H], its last hidden states in a fixed text

    def check(self, here: Origin, what: str) -> None:
        """Raises ``ConfigError`` where ``here`` is another model than this. what: the classifier,
        for the sentence."""
        name = self.shape.name or "unnamed"
        for size in ("hidden_size", "vocab_size", "layers"):
            made_for, found = getattr(self.shape, size), getattr(here.shape, size)
            if made_for != found:
                raise ConfigError(
                    f"{what} was trained for another model ({name}): its {size} is {made_for}, "
                    f"and that of {here.shape.name or 'this one'} is {found}; train one for this."
                )
        pair = self.greeting.double().cpu(), here.greeting.double().cpu()
        alike = float(torch.cosine_similarity(*pair, dim=-1).mean())
        if not alike >= ALIKE:
            raise ConfigError(
                f"{what} was trained for another model ({name}) of the same shape: the hidden "
                f"states of {here.shape.name or 'this one'} have nothing to do with those that it "
                f"reads (cosine {alike:.2f}); train one for this model."
            )
