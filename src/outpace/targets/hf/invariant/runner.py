"""Runs a model in passes of one shape, so that rounding does not depend on what is in a pass."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from outpace.core.trees.tree import Tree
from outpace.errors import ConfigError
from outpace.targets.hf.fixed import CannotRecord, FixedShape, FixedShapes, Outputs, Step
from outpace.targets.hf.recurrent.states import StateCache
from outpace.targets.hf.runner import WITH_STATES, Runner

COLUMNS = 16
"""Columns of each pass over texts that are being written: the last token of a text and up to 15
drafted ones. Up to there a pass over one text takes hardly longer than one over a single token."""


class OneShapeRunner(Runner):
    """A `Runner` whose passes over texts that are being written all have `COLUMNS` columns and as
    many rows as there can be. What is left over is padding.

    A library picks the kernel of a product by the product's shape, and each kernel adds up in an
    order of its own. In passes of one shape the same kernel computes each token, and no row of a
    product depends on another. So a token's logits have the same bits alone and in company, drafted
    and fed one by one.

    Prompts are read as they come, one at a time, and so are passes that leave parts of the model
    out (``through``): these only draft.
    """

    def __init__(self, model: nn.Module, rows: int, max_length: int, fixed: FixedShapes) -> None:
        super().__init__(model, rows, max_length, fixed)
        self._records = True  # as long as the passes can be recorded

    def _why_not_fixed(self) -> str | None:
        name = type(self.model).__name__
        if self._telling.needed:
            reason = "counts positions by the slots of a cache"
        elif isinstance(self.cache, StateCache):
            reason = "goes on from a state"
        elif self._passes.forward is not self.model:  # it is compiled
            return super()._why_not_fixed()
        else:
            return None
        raise ConfigError(
            f"{name} {reason}, which passes of one shape cannot: leave batch_invariant out."
        )

    @property
    def _passes(self) -> FixedShapes:
        assert self.fixed is not None
        return self.fixed

    def _fixed_width(
        self, columns: int, tree: Tree | None, options: Mapping[str, Any]
    ) -> int | None:
        if tree is None:
            return None  # a prompt
        if options not in ({}, WITH_STATES) or not tree.is_chain or columns > COLUMNS:
            raise AssertionError("a pass of one shape over more than chains of few tokens")
        return COLUMNS

    def _fixed_shape(self, count: int, width: int) -> FixedShape:
        rows = self.cache.rows
        if rows == 1:
            return super()._fixed_shape(count, width)
        # Looked up on the device, also while all rows are there and evenly spaced.
        self.reserve(0, [length + width for length in self.lengths])
        slots = self._passes.slots(max(self.lengths) + width, self.cache.longest)
        return FixedShape(rows, width, slots, self.cache.padded_placement(rows))

    def _run_step(self, key: Hashable, step: Step, inputs: Sequence[Tensor]) -> Outputs:
        # The first pass of all makes the cache's buffers, which is no part of any other.
        if self._records and self.cache.layers:
            try:
                return super()._run_step(key, step, inputs)
            except CannotRecord as error:
                name = type(self.model).__name__
                self._passes.left_out(f"the passes of {name} cannot be recorded ({error})")
                self._records = False
        return step(*inputs)
