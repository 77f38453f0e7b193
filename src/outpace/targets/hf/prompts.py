"""Reads the prompts of a target's rows: several short ones in a pass, long ones in pieces."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from outpace.targets.base import HiddenStates, PrefillChunk
from outpace.targets.hf.runner import PREFILL_CHUNK, Runner
from outpace.targets.hf.vision.images import feed_piece
from outpace.targets.hf.vision.prompt import ImagePrompt

PADDING = 1.25
"""Prompts of several rows are read in one pass as long as padding them to the same length costs no
more than a quarter of their tokens."""


@dataclass(eq=False)
class RowPrompt:
    """What is read of a row before its first round."""

    tokens: Sequence[int]
    images: ImagePrompt | None = None
    """The prompt with images, until all of it is read."""


class Prompts:
    """The prompts of the rows, of which the first ``num_ready_rows`` are read but for their last
    tokens."""

    def __init__(self, runner: Runner, fixed_pieces: bool) -> None:
        """fixed_pieces: prompts are read one by one, in pieces that depend on nothing but their
        lengths."""
        self._runner = runner
        self._fixed_pieces = fixed_pieces
        self._padding = PADDING if runner.supports_padding else 1.0
        self._rows: list[RowPrompt] = []
        self.num_ready_rows = 0

    def __getitem__(self, row: int) -> RowPrompt:
        return self._rows[row]

    def admit(self, prompt: RowPrompt) -> None:
        """Adds a row, whose prompt is to be read."""
        self._rows.append(prompt)

    def fork(self, row: int) -> None:
        """Adds a row with a prompt that is read already."""
        self._rows.append(RowPrompt(self._rows[row].tokens))
        self.num_ready_rows += 1

    def retain(self, rows: Sequence[int]) -> None:
        """Keeps these rows."""
        self._rows = [self._rows[row] for row in rows]
        self.num_ready_rows = sum(row < self.num_ready_rows for row in rows)

    def prefill(self, token_budget: int, layers: frozenset[int], full: bool) -> list[PrefillChunk]:
        """As `Target.prefill`. The tokens of sources count as those of prompts do."""
        runner = self._runner
        if runner.sources is not None:
            spent = runner.sources.encode(self.num_ready_rows, token_budget)
            token_budget = max(1, token_budget - spent)
        if self.num_ready_rows and self._left(0) > 0:
            # Their first round, which was to read the rest, came to nothing.
            self.num_ready_rows = 0
        # Where states are wanted they are there before the first round, however prompts are read.
        first = not (layers or full)
        if self.num_ready_rows == 0 and first and self._fit_the_first_pass(token_budget):
            self.num_ready_rows = runner.active
            return []
        unread = self._rows[self.num_ready_rows :]
        runner.reserve(self.num_ready_rows, [len(row.tokens) + 1 for row in unread])
        found = []
        while self._skip_read_rows() < self._readable and token_budget > 0:
            part = self._read_some(token_budget, layers)
            token_budget -= sum(map(len, part.tokens))
            found.append(part)
        return found

    @property
    def _readable(self) -> int:
        """How many rows, from the first on, have all that reading their prompts needs."""
        sources = self._runner.sources
        return self._runner.active if sources is None else sources.encoded

    def _fit_the_first_pass(self, token_budget: int) -> bool:
        """Whether all rows have as much left to read, and little enough, that the pass of their
        first round can read it: one pass less before the first token."""
        if self._fixed_pieces:  # a draft after a prompt gives the pass another shape
            return False
        active = self._runner.active
        if self._readable < active or any(row.images is not None for row in self._rows):
            return False
        left = [self._left(row) for row in range(active)]
        return len(set(left)) == 1 and left[0] < PREFILL_CHUNK and sum(left) <= token_budget

    def _left(self, row: int) -> int:
        return len(self._rows[row].tokens) - 1 - self._runner.lengths[row]

    def _skip_read_rows(self) -> int:
        """Counts as ready the rows whose prompts are read, up to the first that is not."""
        while self.num_ready_rows < self._readable and self._left(self.num_ready_rows) == 0:
            self.num_ready_rows += 1
        return self.num_ready_rows

    def _next_chunk(self, budget: int) -> list[list[int]]:
        """The tokens that the next rows read in one pass."""
        if self._fixed_pieces:
            budget = PREFILL_CHUNK
        found: list[list[int]] = []
        width = total = 0
        for row in range(self.num_ready_rows, self._readable):
            begin = self._runner.lengths[row]
            size = min(self._left(row), PREFILL_CHUNK, budget - total)
            width, total = max(width, size), total + size
            apart = size == 0 or self._rows[row].images is not None or self._fixed_pieces
            if found and (apart or width * (len(found) + 1) > self._padding * total):
                break
            found.append(list(self._rows[row].tokens[begin : begin + size]))
        return found

    def _read_some(self, budget: int, layers: frozenset[int]) -> PrefillChunk:
        """Reads what the next rows read in one pass."""
        first = self.num_ready_rows
        images = self._rows[first].images
        if images is not None:
            return self._read_images(first, images, budget, layers)
        tokens = self._next_chunk(budget)
        output = self._runner.prefill(first, tokens, **hidden_states_kwargs(self._runner, layers))
        return PrefillChunk(
            range(first, first + len(tokens)), tokens, hidden_states_of(output, layers)
        )

    def _read_images(
        self, row: int, images: ImagePrompt, budget: int, layers: frozenset[int]
    ) -> PrefillChunk:
        """Reads the next piece of a prompt with images."""
        # The last token of a prompt is read with those that see it. It is the root of the first
        # round all the same, which writes it to its slot once more as it is.
        prompt, lengths = self._rows[row].tokens, self._runner.lengths
        begin, last, size = lengths[row], len(prompt) - 1, min(budget, PREFILL_CHUNK)
        asked = hidden_states_kwargs(self._runner, layers)
        output = feed_piece(self._runner, row, images, prompt, last, size, **asked)
        known = list(prompt[begin : lengths[row]])
        if lengths[row] >= min(last, len(images)):
            self._rows[row].images = None
        return PrefillChunk([row], [known], hidden_states_of(output, layers, len(known)))


def hidden_states_kwargs(runner: Runner, layers: Collection[int]) -> dict[str, Any]:
    """Returns the arguments of `Runner.forward` that make it give the hidden states of these
    layers."""
    if not layers:
        return {}
    last = getattr(runner.config, "num_hidden_layers", None)
    return {"output_hidden_states": True, **({"last_layer": True} if last in layers else {})}


def hidden_states_of(
    output: Any, layers: Iterable[int], columns: int | None = None
) -> HiddenStates:
    """Returns the hidden states of a pass's first ``columns`` columns, by layer."""
    return {layer: output.hidden_states[layer][:, :columns] for layer in layers}
