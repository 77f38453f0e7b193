"""Runs the decoder of an encoder-decoder over ragged rows, each with a source of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outpace.core.trees.tree import Tree
from outpace.targets.base import Source
from outpace.targets.hf.fixed import FixedShapes
from outpace.targets.hf.output import PassOutput
from outpace.targets.hf.runner import Runner
from outpace.targets.hf.seq2seq.encoding import encoded
from outpace.targets.hf.seq2seq.masks import DecoderMasks
from outpace.targets.hf.seq2seq.memory import Memory
from outpace.targets.hf.seq2seq.side import DecoderSide
from outpace.targets.hf.slots.masks import MaskMaker
from outpace.targets.hf.turns import TURNS
from outpace.targets.hf.weights import pass_bytes


class DecoderRunner(Runner):
    """A runner whose rows see a source each.

    Sources are encoded one by one, without padding, so that a row's numbers are those that it has
    alone; at the latest when a pass covers their row.
    """

    def __init__(
        self, model: nn.Module, rows: int, max_length: int, fixed: FixedShapes | None = None
    ) -> None:
        """Raises ``ConfigError`` where passes should be compiled or recorded (``fixed``)."""
        if fixed is not None:
            fixed.left_out(
                f"the passes of {type(model).__name__}, an encoder-decoder, are not compiled or "
                "recorded"
            )
        self.side = DecoderSide(model)
        self.memory = Memory(rows)
        self._sources: list[Source] = []  # by row
        super().__init__(self.side, rows, max_length)  # type: ignore[arg-type]
        self._turn = TURNS.of(model)

    def _masks(self, model: nn.Module) -> MaskMaker:
        return DecoderMasks(model, self.max_length)

    @property
    def pass_bytes(self) -> int:
        """Bytes of the decoder's weights that one pass reads. Those that made the keys and values
        of sources are not told apart from the others."""
        model = self.side.model
        return pass_bytes(model.get_decoder()) + self.head_bytes

    @property
    def head_bytes(self) -> int:
        return pass_bytes(self.model.model.get_output_embeddings())

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.memory.nbytes

    # -- rows ----------------------------------------------------------------------------------

    def admit(self, count: int, source: Source | None = None) -> None:
        """Adds ``count`` empty rows that see this source."""
        if source is None:
            raise AssertionError("a row of an encoder-decoder was admitted without a source")
        super().admit(count)
        self.memory.admit(count)
        self._sources += [source] * count

    def fork(self, source: int, length: int) -> int:
        row = super().fork(source, length)
        self.memory.fork(source)
        self._sources.append(self._sources[source])
        return row

    def reset(self) -> None:
        super().reset()
        self.memory.reset()
        self._sources = []

    def retain(self, rows: Sequence[int]) -> None:
        super().retain(rows)
        self.memory.retain(rows)
        self._sources = [self._sources[row] for row in rows]

    # -- sources -------------------------------------------------------------------------------

    def encode(self, first: int, token_budget: int) -> int:
        """Encodes the sources of the rows from ``first`` on until the budget is spent; returns how
        many tokens were read, with the last source maybe more than that."""
        spent = 0
        for row in range(first, self.active):
            if spent >= token_budget:
                break
            spent += self._encode(row)
        return spent

    @property
    def encoded(self) -> int:
        """How many rows, from the first on, have their sources encoded."""
        rows = range(self.active)
        return next((row for row in rows if not self.memory.holds(row)), self.active)

    def _encode(self, row: int) -> int:
        """Sees to it that a row's source is encoded; returns how many tokens were read for it."""
        if self.memory.holds(row):
            return 0
        with self._turn:  # the decoder's head is hooked for this
            states = encoded(self.side.model, self._sources[row])
            self.memory.put(row, self.side.memory_of(states))
        return int(states.shape[1])

    # -- passes --------------------------------------------------------------------------------

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
        rows = tokens.shape[0]
        for row in range(first, first + rows):
            self._encode(row)
        self.side.seen = self.memory.seen(first, rows)
        if tokens.shape[1] > 1 or not self.side.drops_short_masks:
            return super()._forward(tokens, keep, tree, first, eager, through, certain, **options)
        two = torch.cat([tokens, torch.zeros_like(tokens)], 1)  # nobody sees the second one
        output = super()._forward(two, 2, tree, first, eager, through, certain, **options)
        states = output.hidden_states
        return PassOutput(
            logits=output.logits[:, :1],
            hidden_states=states and tuple(layer[:, :1] for layer in states),
        )
