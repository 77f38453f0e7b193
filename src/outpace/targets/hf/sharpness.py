"""What a model makes of the product of its last state and its output matrix, besides logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
"""What configurations call a factor of the logits: Cohere's, Falcon-H1's, Muse's."""
DIVISOR = "logits_scaling"
"""What Granite's call one that they are divided by, and others one that they are multiplied by."""
MULTIPLIED = ("hyperclovax",)
"""The beginnings of these others' model types."""
CAPS = ("final_logit_softcapping", "output_logit_soft_cap", "logits_soft_cap")
"""What they call the soft bound of logits: Gemma's, xLSTM's, RecurrentGemma's."""


@dataclass(frozen=True)
class Sharpness:
    """The scale of a model's logits, and their soft bound.

    A head that drafts with the target's output matrix needs both, or its distributions are of
    another temperature than the target's, and fewer of its sampled tokens are accepted.
    """

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: Any) -> Sharpness:
        """Returns what a text model's configuration says."""
        scale = 1.0
        for name in FACTORS:
            scale *= _number(config, name) or 1.0
        divisor = _number(config, DIVISOR) or 1.0
        multiplied = str(getattr(config, "model_type", "")).startswith(MULTIPLIED)
        scale = scale * divisor if multiplied else scale / divisor
        cap = next((found for name in CAPS if (found := _number(config, name))), None)
        return cls(scale, cap)

    def __call__(self, products: Tensor) -> Tensor:
        """Returns the logits ``[..., V]`` of products ``[..., V]`` of states and output matrix.

        >>> Sharpness(scale=0.5)(torch.tensor([2.0, 4.0])).tolist()
        [1.0, 2.0]
        """
        return self.bounded(products if self.scale == 1 else products * self.scale)

    def bounded(self, logits: Tensor) -> Tensor:
        """Returns logits that are scaled already, with their soft bound."""
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def _number(config: Any, name: str) -> float | None:
    found = getattr(config, name, None)
    return float(found) if isinstance(found, (int, float)) else None
