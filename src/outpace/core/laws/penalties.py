"""Penalties for tokens that a text has already: repetition, presence and frequency."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.core.laws.branches import Branches
from outpace.core.laws.constraints import History
from outpace.core.laws.token_counts import TokenCounts
from outpace.core.params import SamplingParams


class Penalties:
    """Lowers the scores of tokens that stand in the texts of B rows, each node's under its own
    history.

    What it keeps from call to call is how often each row's committed tokens occur.
    """

    def __init__(
        self, params: Sequence[SamplingParams], vocabulary: int, device: torch.device
    ) -> None:
        self._vocabulary = vocabulary
        self._repetition = column([p.repetition_penalty for p in params], 1.0, device)
        self._presence = column([p.presence_penalty for p in params], 0.0, device)
        self._frequency = column([p.frequency_penalty for p in params], 0.0, device)
        given = (self._repetition, self._presence, self._frequency)
        self.wanted = any(each is not None for each in given)
        """Whether any row is penalised."""
        rows = len(params) if self.wanted else 0
        self._prompts = TokenCounts(rows, vocabulary, device)
        self._outputs = TokenCounts(rows, vocabulary, device)

    def __call__(self, scores: Tensor, branches: Branches, history: History) -> Tensor:
        """Returns the scores ``[B, m, V]`` of m nodes, penalised."""
        output = self._outputs(history.outputs)[:, None, :].repeat(1, scores.shape[1], 1)
        # What stands where `valid` is false may be anything, and a smaller vocabulary than the
        # target's may lack a token.
        known = branches.valid & (branches.tokens < self._vocabulary)
        tokens = branches.tokens.where(known, torch.zeros_like(branches.tokens))
        output.scatter_add_(2, tokens, known.to(output.dtype))
        if self._repetition is not None:
            seen = (output > 0) | (self._prompts(history.prompts)[:, None, :] > 0)
            penalty = self._repetition.to(scores.dtype)
            scaled = torch.where(scores < 0, scores * penalty, scores / penalty)
            scores = torch.where(seen, scaled, scores)
        if self._frequency is not None:
            scores = scores - self._frequency.to(scores.dtype) * output.to(scores.dtype)
        if self._presence is not None:
            scores = scores - self._presence.to(scores.dtype) * (output > 0).to(scores.dtype)
        return scores


def column(values: Sequence[float | None], off: float, device: torch.device) -> Tensor | None:
    """Returns one number of each row as ``[B, 1, 1]`` float64, or None where all are ``off`` or
    unset, which changes nothing."""
    filled = [off if value is None else value for value in values]
    if all(value == off for value in filled):
        return None
    return torch.tensor(filled, dtype=torch.float64, device=device)[:, None, None]
