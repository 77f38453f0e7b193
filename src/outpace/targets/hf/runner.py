"""Runs one model over ragged rows: its passes, and the lengths that follow them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from outpace.core.request import EncoderInputs
from outpace.core.transfer import padded, to_device
from outpace.core.trees.tree import Tree
from outpace.errors import ConfigError
from outpace.targets.base import KVCacheDtype
from outpace.targets.cpu.weights.blocks import block_bytes
from outpace.targets.hf.attention import sdpa_backends_for
from outpace.targets.hf.device_map import is_multi_device
from outpace.targets.hf.fixed import FixedShapeConfig, FixedShapeRunner
from outpace.targets.hf.kinds import is_encoder_decoder
from outpace.targets.hf.lock import model_lock
from outpace.targets.hf.logits import PassOutput
from outpace.targets.hf.masks import (
    MaskMaker,
    PassLayout,
    chain_layout,
    chain_positions,
    tree_layout,
)
from outpace.targets.hf.model_snapshot import ModelSnapshot
from outpace.targets.hf.nextn import last_layer_output
from outpace.targets.hf.position_patches import PositionPatches
from outpace.targets.hf.prefixes import SavedPrefix
from outpace.targets.hf.recurrent.families import (
    cache_arguments,
    cache_for,
    from_the_embedding,
)
from outpace.targets.hf.recurrent.states import StateCache
from outpace.targets.hf.recurrent.steps import TRIAL, ColumnStepper
from outpace.targets.hf.runner_hooks import PassInfo, RunnerHooks
from outpace.targets.hf.seq2seq.sources import Sources
from outpace.targets.hf.slot_ranges import PassSlots
from outpace.targets.hf.vision.prompt import text_offset
from outpace.targets.hf.weights import pass_bytes

PREFILL_CHUNK = 512
"""Prompt tokens per pass, so that masks and activations stay small."""


class Runner:
    """One model, its cache, what else it needs (`RunnerHooks`), and ``lengths``: how many tokens of
    each row are cached.

    Rows 0..active-1 are in use and every pass covers all of them, but for a prefill, which covers
    the rows that it is given. ``forward`` never changes a length: the caller commits what it
    accepts.
    """

    def __init__(
        self,
        model: nn.Module,
        rows: int,
        max_length: int,
        fixed: FixedShapeConfig | None = None,
        kv_cache_dtype: KVCacheDtype = "auto",
        device: torch.device | None = None,
    ) -> None:
        """fixed: how to run passes whose shapes come again and again, if not as they come.
        kv_cache_dtype: in what its keys and values are held; ``ConfigError`` if it has none.
        device: of the tokens that it is given and of what it returns; unset: the model's."""
        loaded: Any = model  # nn.Module says of no attribute what it is
        self.sources = Sources(model, rows) if is_encoder_decoder(model) else None
        self.model: Any = loaded if self.sources is None else self.sources.decoder
        self._name = type(model).__name__
        self.config: Any = self.model.config.get_text_config()
        self.max_length = max_length
        self.lengths: list[int] = []
        self.offsets: list[int] = []
        """By row, how much further its positions are than its tokens: images take fewer positions
        than placeholders."""
        self.passes = 0
        # The model's own properties walk through its parameters each time.
        self._own_device: torch.device = self.model.device
        self.device = self._own_device if device is None else device
        self.dtype: torch.dtype = self.model.dtype
        self.cache = cache_for(self.model, rows, self._own_device, kv_cache_dtype)
        self.text_offset = text_offset(self.model)  # of a row without images
        self.snapshot = ModelSnapshot.of(self.model)
        self._lock = model_lock(model)
        self._mask = MaskMaker(self.model, max_length)
        self._cached = cache_arguments(self.model, self.cache)
        self.steps: ColumnStepper | None = None
        if isinstance(self.cache, StateCache):
            self.steps = ColumnStepper(self.cache, lambda: Runner(model, 1, TRIAL))
        positions = PositionPatches(model)
        found = (self.sources, self.steps, positions if positions.needed else None)
        self.hooks: list[RunnerHooks] = [hook for hook in found if hook is not None]
        self._needs_layout = any(hook.needs_layout for hook in self.hooks)
        self._min_columns = max((hook.min_columns for hook in self.hooks), default=1)
        self.supports_padding = all(hook.supports_padding for hook in self.hooks)
        """Whether rows of different lengths may be read in one pass, the shorter ones with padding:
        a state that has read padding would be of no use."""
        self.fixed: FixedShapeRunner | None = None
        if fixed is not None:
            self.use_fixed_shapes(fixed)
        if self.steps is not None:
            self.steps.find_mixers(self)

    def use_fixed_shapes(self, shapes: FixedShapeConfig) -> None:
        """Runs passes whose shapes come again and again in this way from now on.

        Raises ``ConfigError`` where that is required and the model has no such passes.
        """
        reason = self._why_not_fixed(shapes)
        if reason is not None:
            shapes.left_out(
                f"the passes of {self._name} are not compiled or recorded, since {reason}"
            )
        else:
            self.fixed = FixedShapeRunner(
                shapes, self.model, self.cache, self._mask, self.max_length
            )

    def _why_not_fixed(self, shapes: FixedShapeConfig) -> str | None:
        """Why the model's passes have no fixed shapes, None if they have."""
        for reason in (hook.why_not_fixed for hook in self.hooks):
            if reason is not None and shapes.columns is None:
                return f"it {reason}"
            if reason is not None:
                raise ConfigError(
                    f"{self._name} {reason}, which passes of one shape cannot: "
                    "leave batch_invariant out."
                )
        compiled = shapes.forward is not self.model
        if is_multi_device(self.model):
            return "its parts lie on several devices"
        if block_bytes(self.model) and (compiled or shapes.columns is None):
            return "its weights are in blocks, which our own code computes"
        return None

    @property
    def active(self) -> int:
        return len(self.lengths)

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling or recording passes so far."""
        return self.fixed.shapes.steps.seconds if self.fixed is not None else 0.0

    @property
    def pass_bytes(self) -> int:
        """Bytes of weights that one pass reads."""
        whole = self.sources is None
        return pass_bytes(self.model) if whole else int(self.model.pass_bytes)

    @property
    def lm_head_bytes(self) -> int:
        """Bytes of these that the logits are made with."""
        return pass_bytes(self.model.get_output_embeddings())

    @property
    def nbytes(self) -> int:
        """Bytes that are cached of all rows."""
        return self.cache.nbytes + sum(hook.nbytes for hook in self.hooks)

    @property
    def supports_partial_logits(self) -> bool:
        """Whether the model takes ``subset``, the tokens whose logits are needed
        (`VocabularySubset`), and needs less time for few."""
        return bool(getattr(self.model.forward, "supports_partial_logits", False))

    # -- rows ----------------------------------------------------------------------------------

    def admit(self, count: int, source: EncoderInputs | None = None) -> None:
        """Adds ``count`` empty rows after the active ones; ``ConfigError`` for a changed model.

        source: what an encoder reads. A model without one does not look at it.
        """
        self.snapshot.check(self.model)
        self.cache.admit(count)
        for hook in self.hooks:
            hook.admit(count, source)
        self.lengths += [0] * count
        self.offsets += [self.text_offset] * count

    def fork(self, source: int, length: int) -> int:
        """Adds a row that begins with the first ``length`` tokens cached of another row, so that
        they are not read again; returns its number."""
        row = self.cache.fork(source, length)
        for hook in self.hooks:
            hook.fork(source)
        self.lengths.append(length)
        self.offsets.append(self.offsets[source])
        return row

    def retain(self, rows: Sequence[int]) -> None:
        """Keeps only these rows (ascending), renumbered from 0."""
        self.cache.retain(rows)
        for hook in self.hooks:
            hook.retain(rows)
        self.lengths = [self.lengths[row] for row in rows]
        self.offsets = [self.offsets[row] for row in rows]

    def reset(self) -> None:
        """Forgets all rows, whatever state an interruption has left."""
        self.lengths, self.offsets = [], []
        self.cache.reset()
        for hook in self.hooks:
            hook.reset()

    def save(self, row: int, length: int) -> SavedPrefix:
        """Returns copies of what is cached of the first ``length`` tokens of a row."""
        return self.cache.saved(row, length)

    def restore(self, row: int, saved: SavedPrefix, length: int) -> None:
        """Lets a row that has cached nothing begin with the first ``length`` saved tokens."""
        self.reserve(row, [length])
        self.cache.restore(row, saved, length)
        self.lengths[row] = length

    def restorable_length(self, row: int, length: int) -> int:
        """Returns the greatest length up to ``length`` at which a row can go on from what it has
        cached: any, but where a state is kept after some tokens only."""
        return self.cache.restorable_length(row, min(length, self.lengths[row]))

    def keep_checkpoint(self, row: int, length: int) -> None:
        """Sees to it that a row can be forked after its first ``length`` tokens, however long it
        grows."""
        self.cache.keep_checkpoint(row, length)

    def drop_checkpoints(self, rollback: int = 0) -> None:
        """Takes the rows' lengths for good: none will go back by more than ``rollback`` tokens."""
        self.cache.drop_checkpoints(self.lengths, rollback)

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
        """Gives each of the rows from ``first`` on this many slots. Rows that get theirs together
        lie next to each other."""
        if self.fixed is None:
            self.cache.reserve(first, slots)
        else:
            self.fixed.reserve(first, slots)

    def prefill(self, first: int, prompts: Sequence[Sequence[int]], **options: Any) -> Any:
        """Caches the prompts into the rows from ``first`` on, padded to the longest of them, and
        commits them; returns the model's output for the last chunk of them."""
        output = None
        if not self.supports_padding and len(set(map(len, prompts))) > 1:
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

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        keep: int,
        tree: Tree | None = None,
        first: int = 0,
        through: Callable[..., Any] | None = None,
        num_committed: int | None = None,
        last_layer: bool = False,
        **options: Any,
    ) -> PassOutput:
        """Returns the model's output for the pending tokens and drafted nodes of consecutive rows.

        tokens: ``[A, T]``: per row its pending tokens, then the nodes of ``tree`` (default: all
        pending, one chain). keep: logits of this many last columns, ``[A, keep, V]``.
        first: the first of the rows.
        through: stands for the model in this pass, which is then neither compiled nor recorded: a
        part of the model, or the model itself with modules that are changed for this pass.
        num_committed: how many first columns are committed in any case, so that no row will go on
        from within them; by default those without logits.
        last_layer: whether the output of the last layer is among the hidden states as it is, too,
        before those that went through the last norm. Such a pass is neither compiled nor recorded.
        options: further arguments of the model, such as ``output_hidden_states``; with
        ``inputs_embeds`` the tokens are not looked at.
        """
        tokens, tree = tokens.to(self._own_device), tree and tree.to(self._own_device)
        # Parts of the model may be exchanged for this pass.
        with self._lock, sdpa_backends_for(self._own_device):
            if self.fixed is not None and through is None and not (first or last_layer):
                output = self.fixed.run(tokens, keep, tree, options, self.lengths, self.offsets)
                if output is not None:
                    self.passes += 1
                    return output.to(self.device)
            rows, columns = tokens.shape
            added = max(0, self._min_columns - columns)
            if added:
                tokens = pad(tokens, (0, added))  # nobody sees these
            starts = self.lengths[first : first + rows]
            self.reserve(first, [start + columns + added for start in starts])
            slots = self.cache.slots = self._slots(first, starts, columns + added)
            positions, mask, layout = self._placed(slots, tree)
            offsets = self._offsets(first, rows)
            arguments = {
                **self._cached,
                **options,
                "input_ids": None if "inputs_embeds" in options else tokens,
                "position_ids": positions if offsets is None else positions + offsets,
                "attention_mask": mask,
                "logits_to_keep": keep + added,
            }
            if num_committed is None:
                pending = columns if tree is None else columns - tree.size
                num_committed = max(0, min(columns - keep, pending - 1))
            given = PassInfo(first, starts, slots.columns, tree, num_committed, layout)
            self.passes += 1
            with ExitStack() as stack:
                for hook in self.hooks:
                    stack.enter_context(hook.around(given))
                last = stack.enter_context(last_layer_output(self.model)) if last_layer else []
                output = (through or self.model)(**arguments)
            # Some models accept logits_to_keep, and give the logits of all columns nevertheless.
            logits = output.logits[:, -(keep + added) :]
            states = self._states(output, arguments)
            if states and last:
                states = (*states[:-1], last[-1], states[-1])
            if added:
                logits = logits[:, :keep]
                states = states and tuple(layer[:, :columns] for layer in states)
            return PassOutput(logits=logits, hidden_states=states).to(self.device)

    def _states(self, output: Any, arguments: Mapping[str, Any]) -> tuple[Tensor, ...] | None:
        """The hidden states of an output, from the embeddings on; None where there are none."""
        states: tuple[Tensor, ...] | None = getattr(output, "hidden_states", None)
        if states is None:
            return None

        def embedded() -> Tensor:
            found: Tensor | None = arguments.get("inputs_embeds")
            if found is not None:
                return found
            made: Tensor = self.model.get_input_embeddings()(arguments["input_ids"])
            return made

        return from_the_embedding(states, self.config.model_type, embedded)

    def _offsets(self, first: int, rows: int) -> Tensor | None:
        """``[A, 1]``: what is added to the positions of consecutive rows; None for nothing."""
        offsets = self.offsets[first : first + rows]
        return to_device(offsets, self._own_device)[:, None] if any(offsets) else None

    def _slots(self, first: int, lengths: Sequence[int], columns: int) -> PassSlots:
        longest = max(lengths)
        return PassSlots(
            self.cache.placement(first, len(lengths)),
            starts=to_device(lengths, self._own_device),
            uniform_start=longest if min(lengths) == longest else None,
            columns=columns,
            view=longest + columns,
        )

    def cached_slots(self, rows: int) -> PassSlots:
        """Returns the slots of what is cached of the first rows, of some."""
        return self._slots(0, self.lengths[:rows], 0)

    def _placed(self, slots: PassSlots, tree: Tree | None) -> tuple[Tensor, Any, PassLayout | None]:
        """The positions ``[A, T]`` and the mask of a pass, and the layout that both come from, None
        where nothing but the positions is needed of it."""
        alone = slots.columns == 1 and slots.uniform_start is not None
        plain = (alone or slots.uniform_start == 0) and self._mask.has_own
        layout = mask = None
        if tree is not None and not tree.is_chain:
            layout = tree_layout(slots.starts, slots.columns - tree.size, tree, slots.view)
        elif self._needs_layout or not plain:
            layout = chain_layout(slots.starts, slots.columns, slots.view)
        if layout is None:
            positions = chain_positions(slots.starts, slots.columns)
        else:
            positions, mask = layout.positions, self._mask(layout)
        if slots.view > self.max_length:
            # Only padding can stand beyond the context: a row that drafts less than others.
            positions = positions.clamp(max=self.max_length - 1)
            layout = None if layout is None else replace(layout, positions=positions)
        return positions, mask, layout
