"""What users may set of look-ups that match the last tokens of a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outpace.core.options import option
from outpace.core.values import flag, is_whole, number, shown
from outpace.errors import ConfigError

DEEPEST = 64
"""Tokens of a context that may be compared with growing texts."""


@dataclass(frozen=True, kw_only=True)
class MatchOptions:
    """How long matches are, and how sure a token must be to be drafted after them."""

    deepest: ClassVar[int] = DEEPEST
    """Tokens of the longest match that can be found."""

    max_token_span: int = option(16, "Tokens of the longest match.")
    min_token_span: int = option(2, "Tokens of the shortest match.")
    min_token_prob: float = option(
        0.1, "The chance, by frequency, below which a token is not drafted."
    )
    tree: bool = option(True, "Whether several continuations are drafted at once.")

    def __post_init__(self) -> None:
        low, high = self.min_token_span, self.max_token_span
        if not (is_whole(low) and is_whole(high) and 1 <= low <= high <= self.deepest):
            raise ConfigError(
                "min_token_span and max_token_span must be whole, with 1 <= min <= max <= "
                f"{self.deepest}, not {shown(low)} and {shown(high)}."
            )
        number("min_token_prob", self.min_token_prob, 0, 1, closed=True, error=ConfigError)
        flag("tree", self.tree, error=ConfigError)
