"""The options of look-ups that match the last tokens of a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from outpace.core.options import Options
from outpace.errors import ConfigError

DEEPEST = 64
"""Tokens of a context that may be compared with growing texts."""


@dataclass(frozen=True, kw_only=True)
class MatchOptions(Options):
    """How long matches are, and how sure a token must be to be drafted after them."""

    max_token_span: Annotated[int, Ge(1), Le(DEEPEST)] = 16
    """Tokens of the longest match."""
    min_token_span: Annotated[int, Ge(1)] = 2
    """Tokens of the shortest match."""
    min_token_prob: Annotated[float, Ge(0), Le(1)] = 0.1
    """The chance, by frequency, below which a token is not drafted."""
    tree: bool = True
    """Whether several continuations are drafted at once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_token_span > self.max_token_span:
            raise ConfigError(
                f"min_token_span={self.min_token_span} must not be above "
                f"max_token_span={self.max_token_span}."
            )
