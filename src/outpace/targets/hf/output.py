"""What a pass gives."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class PassOutput(NamedTuple):
    """The logits of a pass, under the names that models of transformers use.

    Making one of transformers' own outputs takes as long as a layer of a small drafter.
    """

    logits: Tensor  # [A, keep, V]
    hidden_states: tuple[Tensor, ...] | None = None
    """``[A, T, hidden]`` each: the embeddings, and what each layer left; the last is normalised."""
