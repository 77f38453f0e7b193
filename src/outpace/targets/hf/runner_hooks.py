"""Hooks that a runner calls, for what its model needs in addition to a cache of slots.

A target is composed: a model, its cache, and hooks. Recurrent layers need their states to be read
column by column (`recurrent.steps`), decoders of encoder-decoders the sources of their rows
(`seq2seq.sources`), models that count positions by slots the positions of a pass
(`position_patches`). What serves one of them is a `RunnerHooks`, and never another kind of runner.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from outpace.core.request import EncoderInputs
from outpace.core.trees.tree import Tree
from outpace.targets.hf.masks import PassLayout


@dataclass(frozen=True, eq=False)
class PassInfo:
    """One pass over A consecutive rows."""

    first: int
    """The cache's row that is the first of the pass."""
    starts: Sequence[int]  # [A]: how many tokens of each row are cached
    columns: int  # T
    tree: Tree | None
    """What the last columns are; None for a chain."""
    num_committed: int
    """How many of the first columns are committed, whatever the verdict."""
    layout: PassLayout | None
    """Where the columns stand. Made where a hook or the mask needs it."""


class RunnerHooks:
    """The hooks that a runner calls. Here they do nothing."""

    needs_layout: bool = False
    """Whether it needs the `PassLayout` of each pass."""
    supports_padding: bool = True
    """Whether rows of different lengths may be read in one pass, the shorter ones with padding."""
    min_columns: int = 1
    """Columns that a pass has at least."""
    why_not_fixed: str | None = None
    """Why passes have no fixed shapes, as the predicate of a sentence about the model."""

    # -- rows ----------------------------------------------------------------------------------

    def admit(self, count: int, source: EncoderInputs | None) -> None:
        """Adds rows after the others. source: what an encoder reads for each of them."""

    def fork(self, row: int) -> None:
        """Adds a row that begins like another one."""

    def retain(self, rows: Sequence[int]) -> None:
        """Keeps only these rows (ascending), renumbered from 0."""

    def reset(self) -> None:
        """Forgets all rows, whatever state an interruption has left."""

    @property
    def nbytes(self) -> int:
        """Bytes held for the rows."""
        return 0

    # -- passes --------------------------------------------------------------------------------

    def around(self, given: PassInfo) -> AbstractContextManager[None]:
        """Returns a context in which the model computes the pass."""
        return nullcontext()
