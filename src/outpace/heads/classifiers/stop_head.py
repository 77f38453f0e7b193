"""The acceptance-prediction head of SpecDec++ over the draft model's states.

Huang et al. 2024, "SpecDec++: boosting speculative decoding via adaptive candidate lengths" (arXiv
2405.19715).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from outpace.heads.base import ResidualBlock
from outpace.heads.classifiers.base import Classifier, ClassifierConfig
from outpace.heads.classifiers.origin import Origin


@dataclass(frozen=True, kw_only=True)
class StopHeadConfig(ClassifierConfig):
    """What a stop head is built and trained with."""

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


class StopHead(Classifier):
    """Residual blocks and one linear map: the log-odds that a drafted token is accepted."""

    kind: ClassVar[str] = "stop_head"
    Config: ClassVar[type[ClassifierConfig]] = StopHeadConfig

    def __init__(self, origin: Origin, config: StopHeadConfig) -> None:
        super().__init__(origin, config)
        if not (config.rejection_weight and config.every):
            raise ValueError("rejection_weight and every are whole numbers of at least 1")
        width = origin.shape.hidden_size
        self.rejection_weight, self.every, self.greedy = (
            config.rejection_weight,
            config.every,
            config.greedy,
        )
        self.blocks = nn.Sequential(*(ResidualBlock(width) for _ in range(config.blocks)))
        self.linear = nn.Linear(width, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states: Tensor) -> Tensor:
        """states: ``[..., H]`` -> ``[...]``."""
        found: Tensor = self.linear(self.blocks(states))[..., 0]
        return found
