"""Whether a target computes a token's logits alike whatever else is in the pass: found out by some
passes, when it is loaded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.core.transfer import to_device
from outpace.core.trees.tree import Tree
from outpace.errors import ConfigError
from outpace.targets.base import Plan, PromptInputs, Target

PROMPT, TOKENS = 20, 12
"""Tokens that the trial's text begins with, and tokens after them that are compared."""

DRAFTED = 5
"""Tokens that are scored as a draft, at most."""

COMPANY = 3
"""Texts that are scored at once, at most."""


@torch.inference_mode()
def try_alike(target: Target, name: str, vocabulary: int) -> None:
    """Compares a text's logits, fed one token at a time and alone, with those of the same tokens as
    drafts and with other texts. The target has no rows before, and none afterwards.

    name: of the model, for the sentence of the ``ConfigError`` that is raised where any bit of
    these differs.
    """
    trial = _Trial(target, vocabulary)
    try:
        alone = trial.logits(rows=1, drafted=0)
        drafted = min(DRAFTED, target.most_nodes)
        counts = {1, min(COMPANY, target.rows)}
        same = all(torch.equal(alone, trial.logits(rows, drafted)) for rows in counts)
    finally:
        target.retain([])
    if not same:
        dtype = str(target.dtype).removeprefix("torch.")
        raise ConfigError(
            f"{name} on {target.device} in {dtype} gives a token other logits with other tokens "
            "than alone: leave batch_invariant out."
        )


class _Trial:
    """Has a target score the same text in several ways."""

    def __init__(self, target: Target, vocabulary: int) -> None:
        self._target, self._vocabulary = target, vocabulary
        self._count = min(TOKENS, target.max_length - 1)
        self._prompt = max(1, min(PROMPT, target.max_length - self._count))

    def _token(self, row: int, at: int) -> int:
        return (7 + 31 * row + 13 * at) % self._vocabulary

    def logits(self, rows: int, drafted: int) -> Tensor:
        """Returns the logits ``[T, V]`` after each token of the first text from the last one of
        its prompt on, with ``drafted`` drafted ones in a pass, and ``rows`` texts: the others have
        shorter prompts."""
        target = self._target
        target.retain([])
        lengths = [max(1, self._prompt - 3 * row) for row in range(rows)]
        for row, length in enumerate(lengths):
            target.admit(PromptInputs([self._token(row, at) for at in range(length)]))
        while target.ready < target.active:
            target.fill(PROMPT)
        found: list[Tensor] = []
        begin = 0  # tokens that were fed since
        while begin < self._count:
            end = min(begin + 1 + drafted, self._count)
            fed = [
                [self._token(row, length - 1 + at) for at in range(begin, end)]
                for row, length in enumerate(lengths)
            ]
            found.append(self._scored(fed))
            begin = end
        return torch.cat(found)

    def _scored(self, fed: Sequence[Sequence[int]]) -> Tensor:
        """The logits after the first text's tokens, of which the first is pending and the others
        are a draft that is accepted."""
        target, drafted = self._target, len(fed[0]) - 1
        nodes = to_device([row[1:] for row in fed], target.device).reshape(len(fed), drafted)
        tree = Tree.chain(len(fed), drafted, target.device)
        scores = target.score(Plan([row[:1] for row in fed], nodes, tree))
        found = scores.logits[0].clone()
        target.commit([range(1, drafted + 1)] * len(fed))
        return found
