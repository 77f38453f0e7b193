"""Passes in which a token's logits have the same bits alone and in company, drafted and fed one by
one. Then rounding decides no near-tie one way or the other.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from outpace.core.trees.tree_shape import MAX_TREE_NODES
from outpace.errors import ConfigError
from outpace.targets.base import ScoreInputs
from outpace.targets.hf.kinds import has_experts

INVARIANT_COLUMNS = 16
"""Columns of each pass over texts that are being written: the last token of a text and up to 15
drafted ones. Up to there a pass over one text takes hardly longer than one over a single token."""


def max_invariant_tokens(model: nn.Module) -> int:
    """Returns up to how many tokens in a pass each has the same bits, however many they are and
    however they branch. 0: that is known of no number."""
    forward: Any = model.forward
    found: int = getattr(forward, "max_invariant_tokens", 0)
    return found


@dataclass(frozen=True, eq=False)
class BatchInvariance:
    """How the passes of one target are alike.

    A prompt is read by itself, in pieces that depend on nothing but its length. Later passes are
    either those of our own code for CPUs, which computes each token alike, or have one shape
    (`FixedShapeConfig.columns`).
    """

    model: nn.Module
    tokens: int
    """Tokens of a pass over all rows, at most."""
    max_nodes: int
    one_shape: bool
    """Whether passes have one shape, and so score chains only."""

    @classmethod
    def of(cls, model: nn.Module, rows: int, one_shape: bool) -> BatchInvariance:
        """Raises ``ConfigError`` for a model whose passes are never alike."""
        loaded: Any = model
        if one_shape and has_experts(loaded.config.to_dict()):
            raise ConfigError(
                f"{type(model).__name__} is a mixture of experts, each of which computes as many "
                "tokens as choose it, so that its passes are never alike: leave batch_invariant "
                "out."
            )
        tokens = INVARIANT_COLUMNS * rows if one_shape else max_invariant_tokens(model)
        return cls(model, tokens, min(MAX_TREE_NODES, max(0, tokens // rows - 1)), one_shape)

    @property
    def rereads(self) -> bool:
        """Whether a text that is read again, in other pieces, is computed alike as well."""
        return self.tokens == sys.maxsize

    def of_inputs(self, inputs: ScoreInputs) -> ScoreInputs:
        """Returns inputs as they can be scored alike; ``ConfigError`` for a changed model."""
        if self.one_shape:
            # What has been through the first layers was there in a pass of another shape.
            return replace(inputs, precomputed=None)
        if not max_invariant_tokens(self.model):
            raise ConfigError(
                "the model's layers were exchanged or hooked since it was loaded, so that its "
                "passes are not computed alike: leave batch_invariant out."
            )
        return inputs
