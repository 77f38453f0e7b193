"""Prompt look-up: what followed the last time these tokens stood here.

Saxena 2023, "Prompt Lookup Decoding"; `prompt_lookup_num_tokens` in transformers, "ngram" in vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from outpace.core.proposal import Drawn, Point, Proposal
from outpace.core.transfer import to_device
from outpace.core.tree import Tree
from outpace.core.values import is_whole, shown
from outpace.draft.base import Drafter, Rows, Setup
from outpace.errors import ConfigError

LONGEST = 64
"""Tokens that a look-up may compare: each size costs a table entry per token of the text, and texts
that repeat so many tokens also repeat the last few of them."""


class _Index:
    """Where each n-gram of one row was last followed by something, updated as tokens arrive."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._after: dict[tuple[int, ...], int] = {}
        self.ids: list[int] = []

    def learn(self, new: list[int]) -> None:
        """Appends tokens and indexes the n-grams that each of them follows."""
        for token in new:
            end = len(self.ids)
            for size in self._sizes:
                if size <= end:
                    self._after[tuple(self.ids[end - size :])] = end
            self.ids.append(token)

    def follow(self, count: int) -> list[int]:
        """Returns up to ``count`` tokens that followed the longest known suffix."""
        for size in self._sizes:
            start = self._after.get(tuple(self.ids[-size:])) if size <= len(self.ids) else None
            if start is not None:
                return self.ids[start : start + count]
        return []


class NgramDrafter(Drafter):
    """Proposes the tokens after the right-most earlier occurrence of the row's last n tokens.

    The longest n from ``prompt_lookup_max`` down to ``prompt_lookup_min`` that occurs is used. Rows
    without an occurrence propose nothing, which costs nothing.
    """

    name: ClassVar[str] = "ngram"
    draws: frozenset[Drawn] = frozenset({Drawn.POINT})
    options: ClassVar[Mapping[str, Any]] = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}

    def __init__(self, prompt_lookup_max: int = 4, prompt_lookup_min: int = 2) -> None:
        whole = all(map(is_whole, (prompt_lookup_min, prompt_lookup_max)))
        if not whole or not 1 <= prompt_lookup_min <= prompt_lookup_max <= LONGEST:
            raise ConfigError(
                "prompt_lookup_min and prompt_lookup_max must be whole, with 1 <= min <= max <= "
                f"{LONGEST}, not {shown(prompt_lookup_min)} and {shown(prompt_lookup_max)}."
            )
        self._sizes = (prompt_lookup_min, prompt_lookup_max)
        self._rows: list[_Index] = []

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        cls(**options)

    @classmethod
    def build(cls, setup: Setup) -> NgramDrafter:
        return cls(**setup.options)

    def admit(self, prompts: Sequence[Sequence[int]]) -> None:
        self._rows += [_Index(*self._sizes) for _ in prompts]

    def retain(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        drafts = []
        for row, (index, budget) in enumerate(zip(self._rows, budgets, strict=True)):
            index.learn(rows.since(row, len(index.ids)))
            drafts.append(index.follow(budget) if budget else [])
        return point_chains(drafts, rows.seeds.device)


def point_chains(drafts: Sequence[Sequence[int]], device: torch.device) -> Proposal:
    """Returns given chains, one per row, of any lengths, as a proposal."""
    width = max(map(len, drafts), default=0)
    padded = [[*draft, *[0] * (width - len(draft))] for draft in drafts]
    tokens = to_device(padded, device).view(len(drafts), width)
    counts = to_device([len(draft) for draft in drafts], device)
    return Proposal(tokens, Tree.chain(len(drafts), width, device), counts, Point())
