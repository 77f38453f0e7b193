"""Passes in few shapes that come again, so that they can be compiled or recorded.

A pass sees one of a few numbers of slots and, where that is wanted, is padded to one of a few
widths. Then little about it but the numbers in its inputs changes from round to round, and it can
be run again without Python. How that is done is for `engine.capture` to say.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from outpace.core.transfer import power_of_two, to_device
from outpace.core.trees.tree import Tree
from outpace.errors import ConfigError
from outpace.targets.hf.cache import SlotCache, cache_name
from outpace.targets.hf.logits import PassOutput
from outpace.targets.hf.masks import MaskMaker, chain_layout, tree_layout
from outpace.targets.hf.slot_ranges import PassSlots, Placement

LOGGER = logging.getLogger("outpace")

MAX_FIXED_COLUMNS = 64
"""Columns of a pass of fixed shape, at most; wider passes are run as they come."""

PENDING = 2
"""Committed tokens that such a pass feeds at most: more are a prompt, or a model that catches up,
and come in any number."""

SLOT_BUCKET = 256
"""A pass of fixed shape sees slots in multiples of this; one that is recorded, in this times a
power of two."""

WITH_STATES: Mapping[str, Any] = {"output_hidden_states": True}
"""Arguments with which a model gives its hidden states."""

Forward = Callable[..., Any]
Outputs = tuple[Tensor, ...]
Step = Callable[..., Outputs]
"""``step(*inputs)``: computed on the device alone, from its inputs and from buffers that stay where
they are."""


class CaptureFailed(Exception):
    """A step does what a recording cannot hold, such as asking the host."""


class StepRunner(ABC):
    """Runs steps whose shapes come again and again."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Spent so far on steps that were not ready: on compiling and recording them, and on
        running them meanwhile."""
        self._ready: set[Hashable] = set()

    def run(self, key: Hashable, step: Step, inputs: Sequence[Tensor]) -> Outputs:
        """Returns ``step(*inputs)``, which is good until the next step.

        key: all that shapes the step, so that equal keys stand for the same step.
        """
        if key in self._ready:
            return self._run(key, step, inputs)
        begin = perf_counter()
        outputs = self._run_unready(key, step, inputs)
        self.seconds += perf_counter() - begin
        return outputs

    @abstractmethod
    def _run(self, key: Hashable, step: Step, inputs: Sequence[Tensor]) -> Outputs:
        """Runs a step that is ready."""

    def _run_unready(self, key: Hashable, step: Step, inputs: Sequence[Tensor]) -> Outputs:
        """Runs a step that is not ready, and makes it so, at once or when it comes again."""
        self._ready.add(key)
        return self._run(key, step, inputs)

    def forget(self) -> None:
        """Drops all that points into buffers: they have moved."""


@dataclass(frozen=True, eq=False)
class PassShape:
    """The shape of a pass, with its padding, and what the pass sees of the cache."""

    rows: int
    columns: int
    slots: int
    """How many slots of each row it sees."""
    placement: Placement
    """Where the rows lie."""

    @property
    def key(self) -> Hashable:
        """All that shapes a step. A recorded step keeps to where evenly spaced rows lay; where
        others lie it looks up on the device, and any such placement will do."""
        return self.rows, self.columns, self.slots, self.placement.spaced(self.slots)


@dataclass(frozen=True, eq=False)
class FixedShapeConfig:
    """How one model's passes of fixed shapes are run.

    forward: stands for the model in them. steps: runs them. pads: whether few shapes are wanted:
    rows, columns and slots in powers of two.
    required: whether a user has asked for it, so that what has no such passes is refused.
    columns: if given, all passes over texts that are being written have this many columns and as
    many rows as there can be: one shape. What is left over is padding.

    A library picks the kernel of a product by the product's shape, and each kernel adds up in an
    order of its own. In passes of one shape the same kernel computes each token, and no row of a
    product depends on another. So a token's logits have the same bits alone and in company, drafted
    and fed one by one. Prompts are read as they come, one at a time, and so are passes that leave
    parts of the model out: these only draft.
    """

    forward: Forward
    steps: StepRunner
    pads: bool
    required: bool = True
    columns: int | None = None

    def left_out(self, reason: str) -> None:
        """Says that a model's passes are run as they come after all, and why; raises
        ``ConfigError`` where they are required."""
        if self.required:
            raise ConfigError(f"{reason}: leave compile out.")
        LOGGER.warning("outpace: %s; each of them takes somewhat longer.", reason)

    def width(self, columns: int) -> int | None:
        """Returns the columns to pad a pass to, None if it is too wide for a fixed shape."""
        if columns > MAX_FIXED_COLUMNS:
            return None
        return power_of_two(columns) if self.pads else columns

    def rows(self, count: int, most: int) -> int:
        """Returns the rows to pad a pass to. most: as many as there can be."""
        return min(power_of_two(count), most) if self.pads else count

    def slots(self, needed: int, longest: int) -> int:
        """Returns how many slots of each row such a pass sees. longest: those of the largest
        row."""
        seen = -(-needed // SLOT_BUCKET)
        if self.pads:  # few numbers, since each is recorded anew; what is masked costs little
            seen = power_of_two(seen)
        return min(seen * SLOT_BUCKET, longest)


class FixedShapeRunner:
    """The passes of fixed shapes of one model over its cache."""

    def __init__(
        self,
        shapes: FixedShapeConfig,
        model: Any,
        cache: SlotCache,
        mask: MaskMaker,
        max_length: int,
    ) -> None:
        self.shapes = shapes
        self.records = True
        """Whether its passes can be recorded, as far as is known."""
        self._name, self._device = type(model).__name__, model.device
        self._cache, self._mask, self._last = cache, mask, max_length - 1
        self._cached = {cache_name(model.forward): cache, "use_cache": True}
        self._generation = cache.generation  # that recorded passes know

    def reserve(self, first: int, slots: Sequence[int]) -> None:
        """As `SlotCache.reserve`. Recordings end where buffers move: with any, these only grow."""
        keeps = self.shapes.pads and (self.records or self.shapes.columns is not None)
        self._cache.reserve(first, slots, shrink=not keeps)
        if self._cache.generation != self._generation:
            self._generation = self._cache.generation
            self.shapes.steps.forget()

    def run(
        self,
        tokens: Tensor,
        keep: int,
        tree: Tree | None,
        options: Mapping[str, Any],
        lengths: Sequence[int],
        offsets: Sequence[int],
    ) -> PassOutput | None:
        """Returns the output of a pass over the first rows, as `Runner.forward` does; None where
        the pass has no fixed shape.

        lengths, offsets: of all rows, those that wait included.
        """
        width = self._width(tokens.shape[1], tree, options)
        if width is None:
            return None
        rows, columns = tokens.shape
        shape = self._shape(rows, width, lengths)
        more = shape.rows - rows
        # A row that waits is padded after what it has cached, which is overwritten later.
        starts, shifts = ([*of, *[0] * shape.rows][: shape.rows] for of in (lengths, offsets))
        inputs = [pad(tokens, (0, width - columns, 0, more)), to_device(starts, self._device)]
        shifted = to_device(shifts, self._device) if any(shifts) else torch.zeros_like(inputs[1])
        inputs.append(shifted[:, None])
        pending = None  # all that shapes a chain is its width
        if tree is not None and not tree.is_chain:
            pending = columns - tree.size
            inputs.append(pad(tree.parents, (0, width - columns, 0, more)))  # children of the root
        states = bool(options)
        step = partial(self._step, shape, states, pending or 0)
        outputs = self._run(("pass", shape.key, pending, states), step, inputs)
        if outputs is None:
            return None
        logits, *layers = outputs
        # Drafters keep states until later rounds, and the next pass writes over these.
        kept = tuple(layer[:rows, :columns].clone() for layer in layers) or None
        return PassOutput(logits=logits[:rows, columns - keep : columns], hidden_states=kept)

    def _width(self, columns: int, tree: Tree | None, options: Mapping[str, Any]) -> int | None:
        """The columns to pad a pass to, None where it has no fixed shape."""
        known = not options or options == WITH_STATES
        if self.shapes.columns is not None:
            if tree is None:
                return None  # a prompt
            if not (known and tree.is_chain and columns <= self.shapes.columns):
                raise AssertionError("a pass of one shape over more than chains of few tokens")
            return self.shapes.columns
        # The first pass of all makes the cache's buffers.
        if not (known and self.records and self._cache.layers):
            return None
        pending = columns - (0 if tree is None else tree.size)
        return self.shapes.width(columns) if pending <= PENDING else None

    def _shape(self, count: int, width: int, lengths: Sequence[int]) -> PassShape:
        """The shape of a pass over the first rows, padded to ``width`` columns."""
        shapes, cache = self.shapes, self._cache
        # Where all passes have one shape rows are looked up on the device, also while all of them
        # are there and evenly spaced.
        one = shapes.columns is not None and cache.rows > 1
        rows = cache.rows if one else shapes.rows(count, cache.rows)
        ends = [length + width for length in lengths[:rows]]  # of rows that wait, too
        self.reserve(0, ends)
        in_place = not one and rows == count and (cache.begins or not shapes.pads)
        placement = cache.placement(0, rows) if in_place else cache.padded_placement(rows)
        return PassShape(rows, width, shapes.slots(max(ends), cache.longest), placement)

    def _run(self, key: Hashable, step: Step, inputs: Sequence[Tensor]) -> Outputs | None:
        """What a step gives; None for one that is not recorded and need not have this shape."""
        # In passes of one shape the first of all makes the cache's buffers, which is no part of any
        # other.
        if self.records and self._cache.layers:
            try:
                return self.shapes.steps.run(key, step, inputs)
            except CaptureFailed as error:
                self.records = False
                self.shapes.left_out(f"the passes of {self._name} cannot be recorded ({error})")
        return None if self.shapes.columns is None else step(*inputs)

    def _step(
        self,
        shape: PassShape,
        states: bool,
        pending: int,
        tokens: Tensor,
        starts: Tensor,
        offsets: Tensor,
        parents: Tensor | None = None,
    ) -> Outputs:
        """Returns the logits ``[A, T, V]`` of the first rows, and with ``states`` the hidden states
        ``[A, T, H]`` of each layer, with nothing decided on the host but shapes: what a
        `StepRunner` may repeat, as long as the shape's key is the same.

        tokens: ``[A, T]``, fed after ``starts`` ``[A]``; offsets: ``[A, 1]``, of their positions;
        parents: of those after the pending ones, if they make a tree.
        """
        columns, slots = shape.columns, shape.slots
        self._cache.slots = PassSlots(
            shape.placement, starts, None, columns, slots
        ).precompute_indices()
        if parents is None:
            layout = chain_layout(starts, columns, slots)
        else:
            layout = tree_layout(starts, pending, Tree(parents), slots)
        output = self.shapes.forward(
            input_ids=tokens,
            position_ids=layout.positions.clamp(max=self._last) + offsets,
            attention_mask=self._mask(layout),
            logits_to_keep=0,
            **self._cached,
            **(WITH_STATES if states else {}),
        )
        return output.logits, *(output.hidden_states if states else ())
