"""Runs one causal LM over ragged rows: the pass of a plan, and the lengths that follow it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from outpace.core.transfer import padded, to_device
from outpace.core.trees.tree import Tree
from outpace.targets.base import Source
from outpace.targets.cpu.weights.blocks import block_bytes
from outpace.targets.hf.attention import kernels_on
from outpace.targets.hf.fixed import PENDING, CannotRecord, FixedShape, FixedShapes, Outputs, Step
from outpace.targets.hf.output import PassOutput
from outpace.targets.hf.recurrent.own_states import (
    FIRST_LAYER_FIRST,
    cache_arguments,
    cache_for,
)
from outpace.targets.hf.recurrent.states import StateCache
from outpace.targets.hf.recurrent.steps import TRIAL, Steps
from outpace.targets.hf.slots.masks import (
    Layout,
    MaskMaker,
    chain_layout,
    chain_positions,
    tree_layout,
)
from outpace.targets.hf.slots.placement import PassSlots
from outpace.targets.hf.slots.prefixes import SavedText
from outpace.targets.hf.supported.setting import Setting
from outpace.targets.hf.telling.telling import Telling
from outpace.targets.hf.turns import TURNS
from outpace.targets.hf.vision.reading import text_offset
from outpace.targets.hf.weights import pass_bytes

WITH_STATES: Mapping[str, Any] = {"output_hidden_states": True}
"""Arguments with which a model gives its hidden states."""

PREFILL_CHUNK = 512
"""Prompt tokens per pass, so that masks and activations stay small."""


class Runner:
    """One model, its slot cache, and ``lengths``: how many tokens of each row are cached.

    Rows 0..active-1 are in use and every pass covers all of them, but for a prefill, which covers
    the rows that it is given. ``forward`` never changes a length: the caller commits what it
    accepts.
    """

    def __init__(
        self, model: nn.Module, rows: int, max_length: int, fixed: FixedShapes | None = None
    ) -> None:
        """fixed: how to run passes whose shapes come again and again, if not as they come."""
        loaded: Any = model  # nn.Module says of no attribute what it is
        self.model = loaded
        self.config: Any = loaded.config.get_text_config()
        self.max_length = max_length
        self.lengths: list[int] = []
        self.offsets: list[int] = []
        """By row, how much further its positions are than its tokens: images take fewer positions
        than placeholders."""
        self.passes = 0
        # The model's own properties walk through its parameters each time.
        self.device: torch.device = loaded.device
        self.dtype: torch.dtype = loaded.dtype
        self.cache = cache_for(loaded, rows, self.device)
        self._generation = self.cache.generation  # that recorded passes know
        self.text_offset = text_offset(loaded)  # of a row without images
        self.setting = Setting.of(loaded)
        self._turn = TURNS.of(loaded)
        self._mask = self._masks(loaded)
        self._cached = cache_arguments(loaded, self.cache)
        self._telling = Telling(loaded)
        self.fixed = fixed
        if fixed is not None and (reason := self._why_not_fixed()) is not None:
            fixed.left_out(reason)
            self.fixed = None
        self.steps: Steps | None = None
        if isinstance(self.cache, StateCache):
            self.steps = Steps(self.cache, lambda: Runner(model, 1, TRIAL))
            self.steps.find_mixers(self)

    def _masks(self, model: nn.Module) -> MaskMaker:
        return MaskMaker(model, self.max_length)

    def _why_not_fixed(self) -> str | None:
        """Why the model's passes have no fixed shapes, None if they have."""
        name = type(self.model).__name__
        if self._telling.needed:
            return (
                f"the passes of {name} cannot be compiled or recorded, since it counts positions "
                "by slots and is told them anew for each"
            )
        if isinstance(self.cache, StateCache):
            return f"the passes of {name} go on from a state and cannot be compiled or recorded"
        if block_bytes(self.model):
            return "passes over weights in blocks, which our own code computes, are not compiled"
        return None

    @property
    def active(self) -> int:
        return len(self.lengths)

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling or recording passes so far."""
        return self.fixed.steps.seconds if self.fixed is not None else 0.0

    @property
    def pass_bytes(self) -> int:
        """Bytes of weights that one pass reads."""
        return pass_bytes(self.model)

    @property
    def head_bytes(self) -> int:
        """Bytes of these that the logits are made with."""
        return pass_bytes(self.model.get_output_embeddings())

    @property
    def nbytes(self) -> int:
        """Bytes that are cached of all rows."""
        return self.cache.nbytes

    # -- rows ----------------------------------------------------------------------------------

    def admit(self, count: int, source: Source | None = None) -> None:
        """Adds ``count`` empty rows after the active ones; ``ConfigError`` for a changed model.

        source: what an encoder reads. A model without one does not look at it.
        """
        self.setting.check(self.model)
        self.cache.admit(count)
        self.lengths += [0] * count
        self.offsets += [self.text_offset] * count

    def fork(self, source: int, length: int) -> int:
        """Adds a row that begins with the first ``length`` tokens cached of another row, so that
        they are not read again; returns its number."""
        row = self.cache.fork(source, length)
        self.lengths.append(length)
        self.offsets.append(self.offsets[source])
        return row

    def save(self, row: int, length: int) -> SavedText:
        """Returns copies of what is cached of the first ``length`` tokens of a row."""
        states = (
            self.cache.saved_states(row, length) if isinstance(self.cache, StateCache) else None
        )
        return SavedText(self.cache.saved(row, length), states)

    def restore(self, row: int, saved: SavedText, length: int) -> None:
        """Lets a row that has cached nothing begin with the first ``length`` saved tokens."""
        self.reserve(row, [length])
        self.cache.restore(row, saved.slots, length)
        if isinstance(self.cache, StateCache) and saved.states is not None:
            self.cache.restore_states(row, saved.states, [length - 1])
        self.lengths[row] = length

    # -- states: what a model without any does not need -----------------------------------------

    def reach(self, row: int, length: int) -> int:
        """Returns the greatest length up to ``length`` at which a row can go on from what it has
        cached."""
        length = min(length, self.lengths[row])
        return self.cache.reach(row, length) if isinstance(self.cache, StateCache) else length

    def pin(self, row: int, length: int) -> None:
        """Sees to it that a row can be forked after its first ``length`` tokens, however long it
        grows."""
        if isinstance(self.cache, StateCache):
            self.cache.pin(row, length)

    def settle(self, behind: int = 0) -> None:
        """Takes the rows' lengths for good: none will go back by more than ``behind`` tokens."""
        if isinstance(self.cache, StateCache):
            self.cache.settle(self.lengths, behind)

    def reset(self) -> None:
        """Forgets all rows, whatever state an interruption has left."""
        self.lengths, self.offsets = [], []
        self.cache.reset()

    def retain(self, rows: Sequence[int]) -> None:
        """Keeps only these rows (ascending), renumbered from 0."""
        self.cache.retain(rows)
        self.lengths = [self.lengths[row] for row in rows]
        self.offsets = [self.offsets[row] for row in rows]

    def advance(self, counts: Sequence[int]) -> None:
        """Commits: the first ``counts[b]`` columns of the last pass become part of row b, for the
        first rows."""
        added = [*counts, *[0] * (self.active - len(counts))]
        self.lengths = [have + new for have, new in zip(self.lengths, added, strict=True)]

    def advance_paths(self, pending: int, paths: Sequence[Sequence[int]]) -> None:
        """Commits the last pass's pending tokens and, of its tree, each row's accepted path."""
        for row, nodes in enumerate(paths):
            root = self.lengths[row] + pending - 1
            self.cache.move_path(row, root, nodes)
            self.lengths[row] += pending + len(nodes)

    # -- passes --------------------------------------------------------------------------------

    def reserve(self, first: int, slots: Sequence[int]) -> None:
        """Gives each of the rows from ``first`` on n slots. Rows that get theirs in one call
        lie next to each other. Recordings end where buffers move: with any, these only grow."""
        self.cache.reserve(first, slots, shrink=self.fixed is None or not self.fixed.pads)
        if self.fixed is not None and self.cache.generation != self._generation:
            self._generation = self.cache.generation
            self.fixed.steps.forget()

    def prefill(self, first: int, prompts: Sequence[Sequence[int]], **options: Any) -> Any:
        """Caches the prompts into the rows from ``first`` on, padded to the longest of them, and
        commits them; returns the model's output for the last chunk of them."""
        output = None
        if self.steps is not None and len(set(map(len, prompts))) > 1:
            # What a row has behind its last token is lost once padding was read.
            for row, prompt in enumerate(prompts, first):
                output = self.prefill(row, [prompt], **options)
            return output
        longest = max(len(prompt) for prompt in prompts)
        for begin in range(0, longest, PREFILL_CHUNK):
            chunks = [list(prompt[begin : begin + PREFILL_CHUNK]) for prompt in prompts]
            output = self.forward(padded(chunks, self.device), keep=1, first=first, **options)
            for row, chunk in enumerate(chunks, first):
                self.lengths[row] += len(chunk)
        return output

    @property
    def says_fewer(self) -> bool:
        """Whether the model takes ``say``, the tokens whose logits are needed (`SomeTokens`), and
        needs less time for few."""
        return bool(getattr(self.model.forward, "says_fewer", False))

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, keep: int, tree: Tree | None = None, **options: Any
    ) -> PassOutput:
        """Returns the model's output for the pending tokens and drafted nodes of consecutive rows.

        tokens: ``[A, T]``: per row its pending tokens, then the nodes of ``tree`` (default: all
        pending, one chain). keep: logits of this many last columns, ``[A, keep, V]``.
        eager: neither compiled nor recorded, because the model's modules are changed for this pass.
        through: stands for the model in this pass, and is eager, too.
        certain: n first columns are committed in any case, so that no row will go on from
        within them; by default those without logits.
        options: further arguments of the model, such as ``output_hidden_states``; with
        ``inputs_embeds`` the tokens are not looked at.
        """
        # Parts of the model may be exchanged for this pass.
        with self._turn, kernels_on(self.device):
            return self._forward(tokens, keep, tree, **options)

    def _forward(
        self,
        tokens: Tensor,
        keep: int,
        tree: Tree | None,
        first: int = 0,
        eager: bool = False,
        through: Callable[..., Any] | None = None,
        certain: int | None = None,
        **options: Any,
    ) -> PassOutput:
        rows, columns = tokens.shape
        width = None if eager or first or through else self._fixed_width(columns, tree, options)
        if width is not None and self.fixed is not None:
            try:
                return self._forward_fixed(tokens, keep, tree, width, bool(options))
            except CannotRecord as error:
                name = type(self.model).__name__
                self.fixed.left_out(f"the passes of {name} cannot be recorded ({error})")
                self.fixed = None
        lengths = self.lengths[first : first + rows]
        self.reserve(first, [length + columns for length in lengths])
        slots = self._slots(first, lengths, columns)
        self.cache.slots = slots
        positions, mask, layout = self._placed(slots, tree)
        if slots.view > self.max_length:
            # Only padding can stand beyond the context: a row that drafts less than others.
            positions = positions.clamp(max=self.max_length - 1)
            layout = None if layout is None else replace(layout, positions=positions)
        offsets = self._offsets(first, rows)
        positions = positions if offsets is None else positions + offsets
        self.passes += 1
        options = {**self._cached, **options}
        reading = self._reading(first, lengths, tree, columns, keep, certain)
        with reading, self._telling.told(layout):
            output = (through or self.model)(
                input_ids=None if "inputs_embeds" in options else tokens,
                position_ids=positions,
                attention_mask=mask,
                logits_to_keep=keep,
                **options,
            )
        states = getattr(output, "hidden_states", None)
        if states is not None and self.config.model_type in FIRST_LAYER_FIRST:
            embedded = options.get("inputs_embeds")
            embedded = self.model.get_input_embeddings()(tokens) if embedded is None else embedded
            states = (embedded, *states[:-2], states[-1])
        # Some models accept logits_to_keep, and give the logits of all columns nevertheless.
        return PassOutput(logits=output.logits[:, -keep:], hidden_states=states)

    def _reading(
        self,
        first: int,
        starts: Sequence[int],
        tree: Tree | None,
        columns: int,
        keep: int,
        certain: int | None,
    ) -> AbstractContextManager[None]:
        """What lets a model with states read a pass."""
        if self.steps is None:
            return nullcontext()
        if certain is None:
            pending = columns if tree is None else columns - tree.size
            certain = max(0, min(columns - keep, pending - 1))
        return self.steps.reading(first, starts, columns, tree, certain)

    # -- passes of fixed shapes ----------------------------------------------------------------

    def _fixed_shape(self, count: int, width: int) -> FixedShape:
        """The shape of a pass over the first rows, n columns wide."""
        assert self.fixed is not None
        rows = self.fixed.rows(count, self.cache.rows)
        lengths = self.lengths[:rows]  # with those of rows that wait, if there are any
        self.reserve(0, [length + width for length in lengths])
        slots = self.fixed.slots(max(lengths) + width, self.cache.longest)
        in_place = rows == count and (self.cache.begins or not self.fixed.pads)
        place = partial(self.cache.placement, 0) if in_place else self.cache.padded_placement
        return FixedShape(rows, width, slots, place(rows))

    def _fixed_width(
        self, columns: int, tree: Tree | None, options: Mapping[str, Any]
    ) -> int | None:
        """The columns to pad a pass to, None where it is no pass of a fixed shape: as the first
        pass of all, which makes the cache's buffers."""
        states = options == WITH_STATES and self.config.model_type not in FIRST_LAYER_FIRST
        if self.fixed is None or (options and not states) or not self.cache.layers:
            return None
        pending = columns - (0 if tree is None else tree.size)
        return self.fixed.width(columns) if pending <= PENDING else None

    def _forward_fixed(
        self, tokens: Tensor, keep: int, tree: Tree | None, width: int, states: bool
    ) -> PassOutput:
        """`forward` for the first rows, padded to ``width`` columns. states: whether the hidden
        states are wanted."""
        rows, columns = tokens.shape
        shape = self._fixed_shape(rows, width)
        padding = (0, width - columns, 0, shape.rows - rows)
        # A row that waits is padded behind what it has cached, which is overwritten later.
        starts = [*self.lengths, *[0] * shape.rows][: shape.rows]
        inputs = [pad(tokens, padding), to_device(starts, self.device)]
        offsets = self._offsets(0, shape.rows)
        inputs.append(torch.zeros_like(inputs[1])[:, None] if offsets is None else offsets)
        pending = None  # all that shapes a chain is its width
        if tree is not None and not tree.is_chain:
            pending = columns - tree.size
            inputs.append(pad(tree.parents, padding))  # children of the root

        def step(tokens: Tensor, starts: Tensor, offsets: Tensor, *tree: Tensor) -> Outputs:
            return self._fixed_pass(shape, states, tokens, starts, offsets, pending or 0, *tree)

        logits, *layers = self._run_step(("pass", shape.key, pending, states), step, inputs)
        self.passes += 1
        # Drafters keep states until later rounds, and the next pass writes over these.
        kept = tuple(layer[:rows, :columns].clone() for layer in layers) or None
        return PassOutput(logits=logits[:rows, columns - keep : columns], hidden_states=kept)

    def _run_step(self, key: Hashable, step: Step, inputs: Sequence[Tensor]) -> Outputs:
        assert self.fixed is not None
        return self.fixed.steps.run(key, step, inputs)

    def _fixed_pass(
        self,
        shape: FixedShape,
        states: bool,
        tokens: Tensor,
        starts: Tensor,
        offsets: Tensor,
        pending: int = 0,
        parents: Tensor | None = None,
    ) -> Outputs:
        """Returns the logits ``[A, T, V]`` of the first rows, and with ``states`` the hidden states
        ``[A, T, H]`` of each layer, with nothing decided on the host but shapes: what a
        `StepRunner` may repeat, as long as the shape's key is the same.

        tokens: ``[A, T]``, fed behind ``starts`` ``[A]``; offsets: ``[A, 1]``, of their positions;
        parents: of those after the pending ones, if they make a tree.
        """
        assert self.fixed is not None
        columns, slots = shape.columns, shape.slots
        self.cache.slots = PassSlots(shape.placement, starts, None, columns, slots).worked_out()
        if parents is None:
            layout = chain_layout(starts, columns, slots)
        else:
            layout = tree_layout(starts, pending, Tree(parents), slots)
        output = self.fixed.forward(
            input_ids=tokens,
            position_ids=layout.positions.clamp(max=self.max_length - 1) + offsets,
            attention_mask=self._mask(layout),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=0,
            **(WITH_STATES if states else {}),
        )
        return output.logits, *(output.hidden_states if states else ())

    # -- plans ---------------------------------------------------------------------------------

    def _offsets(self, first: int, rows: int) -> Tensor | None:
        """``[A, 1]``: what is added to the positions of consecutive rows; None for nothing."""
        offsets = self.offsets[first : first + rows]
        offsets += [0] * (rows - len(offsets))
        return to_device(offsets, self.device)[:, None] if any(offsets) else None

    def _slots(self, first: int, lengths: Sequence[int], columns: int) -> PassSlots:
        longest = max(lengths)
        return PassSlots(
            self.cache.placement(first, len(lengths)),
            starts=to_device(lengths, self.device),
            uniform_start=longest if min(lengths) == longest else None,
            columns=columns,
            view=longest + columns,
        )

    def _placed(self, slots: PassSlots, tree: Tree | None) -> tuple[Tensor, Any, Layout | None]:
        """The positions ``[A, T]`` and the mask of a pass, and the layout that both come from, None
        where nothing but the positions is needed of it."""
        if tree is not None and not tree.is_chain:
            pending = slots.columns - tree.size
            layout = tree_layout(slots.starts, pending, tree, slots.view)
            return layout.positions, self._mask(layout), layout
        alone = slots.columns == 1 and slots.uniform_start is not None
        plain = (alone or slots.uniform_start == 0) and self._mask.has_own
        if plain and not self._telling.needed:
            return chain_positions(slots.starts, slots.columns), None, None
        layout = chain_layout(slots.starts, slots.columns, slots.view)
        return layout.positions, self._mask(layout), layout
