"""What the choice of how much to draft looks at in a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outpace.core.params import SamplingParams


class DraftingRow(Protocol):
    """One text in the making, as far as the number of its drafted tokens depends on it."""

    @property
    def params(self) -> SamplingParams:
        """Its resolved options."""

    @property
    def prompt_ids(self) -> Sequence[int]:
        """The tokens of its prompt."""

    @property
    def length(self) -> int:
        """Its committed tokens, those of the prompt included."""

    @property
    def remaining(self) -> int:
        """How many tokens may still be generated."""

    @property
    def output_ids(self) -> Sequence[int]:
        """What was generated so far."""

    @property
    def finished(self) -> bool:
        """Whether the text has ended."""
