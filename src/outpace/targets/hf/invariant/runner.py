"""Runs a model in passes of one shape, so that rounding does not depend on what is in a pass."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.modeling_outputs import CausalLMOutputWithPast

from outpace.core.transfer import to_device
from outpace.core.trees.tree import Tree
from outpace.errors import ConfigError
from outpace.targets.hf.fixed import CannotRecord, FixedShape, FixedShapes, Outputs, Step
from outpace.targets.hf.recurrent.own_states import cache_for
from outpace.targets.hf.recurrent.states import StateCache
from outpace.targets.hf.runner import WITH_STATES, Runner
from outpace.targets.hf.slots.cache import SlotCache
from outpace.targets.hf.slots.extents import GRAIN

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
        self._rows = rows
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

    def _new_cache(self, model: nn.Module, rows: int) -> SlotCache:
        return cache_for(model, rows, self.device, spare=GRAIN if rows > 1 else 0)

    def _forward(
        self,
        tokens: Tensor,
        keep: int,
        tree: Tree | None,
        first: int = 0,
        eager: bool = False,
        through: Any = None,
        certain: int | None = None,
        **options: Any,
    ) -> Any:
        if tree is None or through is not None:
            return super()._forward(
                tokens, keep, tree, first, eager=True, through=through, certain=certain, **options
            )
        if eager or options not in ({}, WITH_STATES) or not tree.is_chain:
            raise AssertionError("a pass of one shape over more than chains of tokens")
        return self._play(self._shape_of_all(), tokens, keep, states=bool(options))

    def _shape_of_all(self) -> FixedShape:
        """The shape of passes over texts that are being written."""
        if self._rows == 1:
            return self._fixed_shape(0, 1, COLUMNS)
        found = self._fixed_shape(0, self.active, COLUMNS)
        return FixedShape(self._rows, COLUMNS, found.slots, self.cache.placement_of_all())

    def _play(
        self, shape: FixedShape, tokens: Tensor, keep: int, states: bool
    ) -> CausalLMOutputWithPast:
        """The model's output for tokens ``[A, T]`` of the first rows in a pass of a shape."""
        rows, columns = tokens.shape
        missing = shape.rows - rows
        # Rows whose prompts are being read have their padding behind what they have read.
        starts = to_device([*self.lengths, *[0] * (shape.rows - self.active)], self.device)
        padded = pad(tokens, (0, shape.columns - columns, 0, missing))

        def step(tokens: Tensor, starts: Tensor, offsets: Tensor) -> Outputs:
            return self._fixed_pass(shape, states, tokens, starts, offsets)

        inputs = [padded, starts, torch.zeros_like(starts)[:, None]]
        logits, *layers = self._run(step, ("pass", shape.key, states), inputs)
        self.passes += 1
        kept = tuple(layer[:rows, :columns].clone() for layer in layers) or None
        return CausalLMOutputWithPast(
            logits=logits[:rows, columns - keep : columns], hidden_states=kept
        )

    def _run(self, step: Step, key: Hashable, inputs: Sequence[Tensor]) -> Outputs:
        """What a step returns: recorded, unless it cannot be, or makes the cache's buffers."""
        if self._records and self.cache.layers:
            try:
                return self._passes.steps.run(key, step, inputs)
            except CannotRecord as error:
                name = type(self.model).__name__
                self._passes.left_out(f"the passes of {name} cannot be recorded ({error})")
                self._records = False
        return step(*inputs)
