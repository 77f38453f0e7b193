"""An unfinished text of a beam search, and one that has ended."""

from __future__ import annotations

from dataclasses import dataclass

from outpace.engine.request import Request


@dataclass(frozen=True, eq=False)
class Beam:
    """An unfinished text: what was written, and how likely it is."""

    output_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    """The sum over its tokens."""
    parent: int = 0
    """The number, among the beams of the step before, of the one that it continues."""


@dataclass(frozen=True, eq=False)
class Ended:
    """A text that has ended, and its place among the others."""

    request: Request
    logprob: float
    """The sum over its tokens."""
    score: float
    """The same, divided by the text's length to the power of the length penalty."""
