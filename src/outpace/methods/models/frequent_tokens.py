"""The tokens that a draft model scores: all of them, or only the usual ones.

The last layer of a small model with a large vocabulary is a third of what it reads for each token.
A draft need not be any token: what is never drafted has probability 0 in the draft's distribution,
and the text keeps the target's distribution. So the rare tokens are left out (FR-Spec, Zhao et al.
2025, arXiv 2502.14856). Their numbers say which ones are rare: a byte-pair vocabulary lists
its tokens in the order in which they were merged, the most frequent ones first. But a text that has
used a rare token uses it again, and some are not rare at all in what models write: marks of code,
and of the end of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outpace.core.logits.truncation import NEG_INF
from outpace.targets.hf.logits import VocabularySubset

NUM_FREQUENT = 49_152
"""Tokens that "auto" takes for the usual ones. They are 97 to 98 % of English texts and of Python
code in the vocabulary of Qwen2.5, which has 151,665."""

RECENT_WINDOW = 64
"""Tokens at the end of a text that say whether it is a usual one: how many of them are rare."""

MAX_RARE = 8
"""A text is a usual one if at most n of its `RECENT_WINDOW` last tokens are rare. A text in another
script has many more, and its drafts would be rejected where they had to be rare tokens."""

REUSE_WINDOW = 1024
"""Tokens at the end of a text whose rare ones are drafted, too."""

MAX_REUSED = 128
"""Rare tokens of a text that are, at most: the latest ones."""

MARKS = "``` ```python"
"""What answers are full of, though a vocabulary of byte pairs may list it late."""


class FrequentTokens:
    """Which tokens the rows of a round may draft, and what their logits are then.

    Which they are depends on each row's own text alone, so that its draft does not depend on the
    other rows.
    """

    def __init__(self, first: int, always: Sequence[int] = ()) -> None:
        """first: n tokens, the first of the vocabulary, are usual ones. always: others that
        are."""
        self.first = first
        self._always = frozenset(token for token in always if token >= first)
        self._others: list[frozenset[int] | None] = []  # by row; None: it may draft any token
        self._needed: VocabularySubset | None = None
        self._allowed: Tensor | None = None

    def start_round(self, texts: Sequence[Sequence[int]], live: Sequence[bool]) -> None:
        """Takes up a round. texts: of each row, in the model's tokens; live: rows that draft."""
        self._allowed = None
        self._others = [
            self._others_of(text) if on else frozenset()
            for text, on in zip(texts, live, strict=True)
        ]
        some = [others for others in self._others if others is not None]
        needed = VocabularySubset(self.first, tuple(sorted(frozenset[int]().union(*some))))
        self._needed = needed if len(some) == len(self._others) else None

    def _others_of(self, text: Sequence[int]) -> frozenset[int] | None:
        """The rare tokens that are drafted after a text; None for all of them."""
        if sum(token >= self.first for token in text[-RECENT_WINDOW:]) > MAX_RARE:
            return None
        had = dict.fromkeys(
            token for token in reversed(text[-REUSE_WINDOW:]) if token >= self.first
        )
        return self._always.union(list(had)[:MAX_REUSED])

    @property
    def needed(self) -> VocabularySubset | None:
        """The tokens of which logits are needed, None for all."""
        return self._needed

    def only(self, logits: Tensor) -> Tensor:
        """Returns logits ``[B, T, V]`` without the tokens that the rows do not draft; of the first
        tokens only, ``[B, T, V']``, where no row drafts others."""
        if self._needed is not None and not self._needed.others:
            return logits[..., : self.first]
        if all(others is None for others in self._others):
            return logits
        if self._allowed is None:
            self._allowed = self._marked(logits)
        return logits.masked_fill(~self._allowed, NEG_INF)

    def _marked(self, logits: Tensor) -> Tensor:
        """Which tokens each row may draft, ``[B, 1, V]``."""
        allowed = torch.zeros(len(logits), 1, logits.shape[-1], dtype=torch.bool)
        allowed[..., : self.first] = True
        for row, others in enumerate(self._others):
            allowed[row, 0, slice(None) if others is None else list(others)] = True
        return allowed.to(logits.device)


def marks(tokenizer: Any) -> list[int]:
    """Returns tokens that are usual in answers, whatever their numbers."""
    if tokenizer is None:
        return []
    return [*tokenizer.all_special_ids, *tokenizer.encode(MARKS, add_special_tokens=False)]
