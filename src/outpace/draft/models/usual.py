"""The tokens that a draft model scores: all of them, or only the usual ones.

The last layer of a small model with a large vocabulary is a third of what it reads for each token.
A draft need not be any token: what is never drafted has probability 0 in the draft's law, and the
text keeps the target's law. So the rare tokens are left out (FR-Spec, Zhao et al. 2025, arXiv
2502.14856). Which ones are rare is told by their numbers: a byte-pair vocabulary lists its tokens
in the order in which they were merged, the most frequent ones first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.draft.vocabulary import NEVER

USUAL = 49_152
"""Tokens that "auto" takes for the usual ones. They are 97 to 98 % of English texts and of Python
code in the vocabulary of Qwen2.5, which has 151,665."""

RECENT = 64
"""Tokens at the end of a text that say whether it is a usual one."""

RARE = 8
"""Of these, how many may be rare ones. A text in another script has many more, and its drafts
would be rejected where they had to be rare tokens."""


class UsualTokens:
    """Which rows of a round draft usual tokens only, and what their logits are then.

    Which they are depends on each row's own text alone, so that its draft does not depend on the
    rows beside it.
    """

    def __init__(self, first: int) -> None:
        """first: so many tokens, the first of the vocabulary, are the usual ones."""
        self.first = first
        self._usual: list[bool] = []  # by row

    def look_at(self, texts: Sequence[Sequence[int]], live: Sequence[bool]) -> None:
        """Takes up a round. texts: of each row, in the model's tokens; live: rows that draft."""
        self._usual = [not on or self._is_usual(text) for text, on in zip(texts, live, strict=True)]

    def _is_usual(self, text: Sequence[int]) -> bool:
        return sum(token >= self.first for token in text[-RECENT:]) <= RARE

    @property
    def needed(self) -> int | None:
        """Of how many tokens logits are needed, None for all."""
        return self.first if all(self._usual) else None

    def only(self, logits: Tensor) -> Tensor:
        """Returns logits ``[B, T, V]`` without the rare tokens of the rows that do not draft them,
        ``[B, T, V']`` with fewer tokens where no row does."""
        if all(self._usual):
            return logits[..., : self.first]
        if any(self._usual):
            logits = logits.clone()
            logits[torch.tensor(self._usual), :, self.first :] = NEVER
        return logits
