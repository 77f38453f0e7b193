"""The judge: one linear map from the target's state at a drafted token.

Bachmann et al. 2025, "Judge decoding: faster speculative sampling requires going beyond model
alignment" (arXiv 2501.19309).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from outpace.heads.classifiers.base import Classifier, ClassifierConfig
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
