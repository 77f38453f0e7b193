"""The distributions of plain decoding along given texts, from whole forwards without a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.core.logits_pipeline import Branches, History, LogitsPipeline, RowOptions
from outpace.targets.base import Target


@dataclass(frozen=True, eq=False)
class Step:
    """The distributions of one position of several texts that share a prompt."""

    position: int
    rows: list[int]  # which of the texts reach this position
    probs: Tensor  # [R, V] float64
    forbidden: Tensor  # [R, V] bool: what the options forbid, however the logits are rounded


@dataclass(frozen=True, eq=False)
class PlainProbs:
    """What plain decoding draws each token from, under one request's resolved options."""

    target: Target
    options: RowOptions
    vocabulary: int

    def __call__(self, prompt: Sequence[int], texts: Sequence[Sequence[int]]) -> Iterator[Step]:
        """Yields the distributions of the texts' tokens, position by position."""
        logits = [self.target.plain([*prompt, *text[:-1]], last=len(text)) for text in texts]
        for position in range(max(len(text) for text in texts)):
            rows = [row for row, text in enumerate(texts) if len(text) > position]
            here = torch.stack([logits[row][position] for row in rows])[:, None]
            yield self._step(position, rows, here, prompt, texts)

    def _step(
        self,
        position: int,
        rows: list[int],
        logits: Tensor,
        prompt: Sequence[int],
        texts: Sequence[Sequence[int]],
    ) -> Step:
        history = History([prompt] * len(rows), [texts[row][:position] for row in rows])
        root = Branches.root(len(rows), logits.device)
        maker = LogitsPipeline([self.options] * len(rows), self.vocabulary, logits.device)
        probs = maker(logits, root, history)[:, 0].double().cpu()
        scores = maker.adjusted(logits, root, history)[:, 0]
        return Step(position, rows, probs, scores.isneginf().cpu())
