"""The rows of a model's output matrix, however it is held."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from outpace.targets.hf.sharpness import Sharpness


def output_rows(model: nn.Module, tokens: Tensor) -> Tensor | None:
    """Returns the output matrix's rows ``[R, H]`` of some tokens with the scale of the logits,
    float32; None where the matrix is not held as one.

    The soft bound of the logits is not in them (`Sharpness.bounded`).
    """
    loaded: Any = model
    weight = _matrix(loaded.get_output_embeddings())
    if weight is None:
        return None
    scale = Sharpness.of(loaded.config.get_text_config()).scale
    return weight[tokens.to(weight.device)].float() * scale


def _matrix(head: Any) -> Tensor | None:
    plain = getattr(head, "plain_weight", None)  # where it is held otherwise
    weight: Tensor | None = plain() if plain else getattr(head, "weight", None)
    if weight is not None and is_traceable_wrapper_subclass(weight):
        whole: Any = weight
        weight = whole.dequantize()
    return None if weight is None else weight.detach()
