"""A target that computes a token's logits alike whatever else is in the pass."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from torch import nn

from outpace.core.trees.tree_shape import LARGEST
from outpace.errors import ConfigError
from outpace.targets.base import Plan, Scores
from outpace.targets.hf.fixed import FixedShapes
from outpace.targets.hf.invariant.runner import COLUMNS, OneShapeRunner
from outpace.targets.hf.runner import PREFILL_CHUNK, Runner
from outpace.targets.hf.supported.experts import has_experts
from outpace.targets.hf.target import HFTarget


def tokens_alike(model: nn.Module) -> int:
    """Returns up to how many tokens in a pass each has the same bits, however many they are and
    however they branch. 0: that is known of no number."""
    forward: Any = model.forward
    found: int = getattr(forward, "tokens_alike", 0)
    return found


class InvariantTarget(HFTarget):
    """An `HFTarget` whose logits of a token have the same bits alone and in company, drafted and
    fed one by one. Then rounding decides no near-tie one way or the other.

    A prompt is read by itself, in pieces that depend on nothing but its length. Later passes are
    either those of our own code for CPUs, which computes each token alike, or have one shape
    (`OneShapeRunner`).
    """

    def __init__(
        self,
        model: nn.Module,
        rows: int,
        max_length: int,
        fixed: FixedShapes | None,
        saved_texts: int = 0,
        saved_tokens: int | None = None,
    ) -> None:
        """fixed: as for `HFTarget`; unset where the model's own passes compute tokens alike."""
        self.chains_only = fixed is not None  # in passes of one shape
        self.tokens = COLUMNS * rows if self.chains_only else tokens_alike(model)
        """Tokens of a pass over all rows, at most."""
        self.rereads = self.tokens == sys.maxsize
        """Whether a text that is read again, in other pieces, is computed alike as well."""
        super().__init__(model, rows, max_length, fixed, saved_texts, saved_tokens)
        self._limit = None  # with another number of threads torch adds up in another order
        self.most_nodes = min(LARGEST, max(0, self.tokens // rows - 1))

    def _runner(self, model: nn.Module, fixed: FixedShapes | None) -> Runner:
        if fixed is None:
            return super()._runner(model, fixed)
        if has_experts(self._entries(model)):
            raise ConfigError(
                f"{type(model).__name__} is a mixture of experts, each of which computes as many "
                "tokens as choose it, so that its passes are never alike: leave batch_invariant "
                "out."
            )
        return OneShapeRunner(model, self.rows, self.max_length, fixed)

    @staticmethod
    def _entries(model: Any) -> dict[str, Any]:
        found: dict[str, Any] = model.config.to_dict()
        return found

    def _fit_the_first_pass(self, token_budget: int) -> bool:
        return False  # what is read with a draft behind it is read in a pass of another shape

    def _next_chunk(self, budget: int) -> list[list[int]]:
        row = self._ready
        begin = self.runner.lengths[row]
        size = min(self._left(row), PREFILL_CHUNK)
        return [list(self._prompts[row][begin : begin + size])]

    def score(self, plan: Plan) -> Scores:
        if self.chains_only:
            # What has been through the first layers was there in a pass of another shape.
            return super().score(replace(plan, precomputed=None))
        if not tokens_alike(self.model):
            raise ConfigError(
                "the model's layers were exchanged or hooked since it was loaded, so that its "
                "passes are not computed alike: leave batch_invariant out."
            )
        return super().score(plan)
