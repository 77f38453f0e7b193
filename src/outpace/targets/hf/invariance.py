"""Passes in which a token's logits have the same bits alone and in company, drafted and fed one by
one. Then rounding decides no near-tie one way or the other.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from outpace.core.trees.tree_shape import LARGEST
from outpace.errors import ConfigError
from outpace.targets.base import Plan
from outpace.targets.hf.kinds import has_experts

COLUMNS = 16
"""Columns of each pass over texts that are being written: the last token of a text and up to 15
drafted ones. Up to there a pass over one text takes hardly longer than one over a single token."""


def tokens_alike(model: nn.Module) -> int:
    """Returns up to how many tokens in a pass each has the same bits, however many they are and
    however they branch. 0: that is known of no number."""
    forward: Any = model.forward
    found: int = getattr(forward, "tokens_alike", 0)
    return found


@dataclass(frozen=True, eq=False)
class BatchInvariance:
    """How the passes of one target are alike.

    A prompt is read by itself, in pieces that depend on nothing but its length. Later passes are
    either those of our own code for CPUs, which computes each token alike, or have one shape
    (`FixedShapes.columns`).
    """

    model: nn.Module
    tokens: int
    """Tokens of a pass over all rows, at most."""
    most_nodes: int
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
        tokens = COLUMNS * rows if one_shape else tokens_alike(model)
        return cls(model, tokens, min(LARGEST, max(0, tokens // rows - 1)), one_shape)

    @property
    def rereads(self) -> bool:
        """Whether a text that is read again, in other pieces, is computed alike as well."""
        return self.tokens == sys.maxsize

    def of_plan(self, plan: Plan) -> Plan:
        """Returns a plan as it can be scored alike; ``ConfigError`` for a changed model."""
        if self.one_shape:
            # What has been through the first layers was there in a pass of another shape.
            return replace(plan, precomputed=None)
        if not tokens_alike(self.model):
            raise ConfigError(
                "the model's layers were exchanged or hooked since it was loaded, so that its "
                "passes are not computed alike: leave batch_invariant out."
            )
        return plan
