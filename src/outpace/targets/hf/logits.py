"""The logits of a pass, their scale and soft cap, and the rows of the output matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from outpace.targets.hf.device_map import onload_weights


class PassOutput(NamedTuple):
    """The logits of a pass, under the names that models of transformers use.

    Making one of transformers' own outputs takes as long as a layer of a small drafter.
    """

    logits: Tensor  # [A, keep, V]
    hidden_states: tuple[Tensor, ...] | None = None
    """``[A, T, hidden]`` each: the embeddings, and what each layer left; the last is normalised."""

    def to(self, device: torch.device) -> PassOutput:
        """Returns the same on a device."""
        if self.logits.device == device:
            return self
        states = self.hidden_states
        moved = None if states is None else tuple(layer.to(device) for layer in states)
        return PassOutput(self.logits.to(device), moved)


FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
"""What configurations call a factor of the logits: Cohere's, Falcon-H1's, Muse's."""
DIVISOR = "logits_scaling"
"""What Granite's call one that they are divided by, and others one that they are multiplied by."""
MULTIPLIED = ("hyperclovax",)
"""The beginnings of these others' model types."""
CAPS = ("final_logit_softcapping", "output_logit_soft_cap", "logits_soft_cap")
"""What they call the soft bound of logits: Gemma's, xLSTM's, RecurrentGemma's."""


@dataclass(frozen=True)
class LogitScaling:
    """The scale of a model's logits, and their soft bound.

    A head that drafts with the target's output matrix needs both, or its distributions are of
    another temperature than the target's, and fewer of its sampled tokens are accepted.
    """

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: Any) -> LogitScaling:
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

        >>> LogitScaling(scale=0.5)(torch.tensor([2.0, 4.0])).tolist()
        [1.0, 2.0]
        """
        return self.apply_soft_cap(products if self.scale == 1 else products * self.scale)

    def apply_soft_cap(self, logits: Tensor) -> Tensor:
        """Returns logits that are scaled already, with their soft bound."""
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def _number(config: Any, name: str) -> float | None:
    found = getattr(config, name, None)
    return float(found) if isinstance(found, (int, float)) else None


def output_rows(model: nn.Module, tokens: Tensor) -> Tensor | None:
    """Returns the output matrix's rows ``[R, H]`` of some tokens with the scale of the logits,
    float32; None where the matrix is not held as one.

    The soft bound of the logits is not in them (`LogitScaling.apply_soft_cap`).
    """
    loaded: Any = model
    head = loaded.get_output_embeddings()
    scale = LogitScaling.of(loaded.config.get_text_config()).scale
    with onload_weights(head):
        weight = _matrix(head)
        return None if weight is None else weight[tokens.to(weight.device)].float() * scale


def _matrix(head: Any) -> Tensor | None:
    plain = getattr(head, "plain_weight", None)  # where it is held otherwise
    weight: Tensor | None = plain() if plain else getattr(head, "weight", None)
    if weight is not None and is_traceable_wrapper_subclass(weight):
        whole: Any = weight
        weight = whole.dequantize()
    return None if weight is None else weight.detach()


class VocabularySubset(NamedTuple):
    """The tokens whose logits a pass is asked for: the first ones of the vocabulary, and others."""

    first: int
    """How many, from 0 on."""
    others: tuple[int, ...] = ()
    """In order, none of the first ones."""
