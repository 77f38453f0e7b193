"""Tokens of which a pass is asked for the logits, where it is not all."""

from __future__ import annotations

from typing import NamedTuple


class SomeTokens(NamedTuple):
    """The first tokens of a vocabulary, and some others."""

    first: int
    """So many, from 0 on."""
    others: tuple[int, ...] = ()
    """In order, none of the first ones."""
