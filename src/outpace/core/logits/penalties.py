"""Penalties for tokens that a text has already: repetition, presence and frequency."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.core.logits.branches import Branches
from outpace.core.logits.constraints import History
from outpace.core.logits.token_counts import TokenCounts
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
        """Returns the scores ``[B, m, V]`` of m nodes, penalised, as a new tensor.

        Only the scores of tokens that have occurred are computed: in a large vocabulary they are
        few. A token that is listed twice gets the same score twice.
        """
        outputs = self._outputs(history.outputs)
        listed = [self._outputs.occurring]
        if self._repetition is not None:
            prompts = self._prompts(history.prompts)
            listed.append(self._prompts.occurring)
        # [B, m, U]: the tokens that a row has, and those drafted before a node.
        tokens = listed[0] if len(listed) == 1 else torch.cat(listed, 1)
        tokens = tokens[:, None].expand(-1, scores.shape[1], -1)
        drafted = self._drafted(branches)
        if drafted is not None:
            tokens = torch.cat((tokens, drafted.clamp(min=0)), 2)
        flat = tokens.flatten(1)
        count = outputs.gather(1, flat).view(tokens.shape).to(scores.dtype)
        if drafted is not None:
            count = count + (tokens[..., None] == drafted[:, :, None]).sum(-1)
        found = scores.gather(2, tokens)
        if self._repetition is not None:
            occurred = (count > 0) | (prompts.gather(1, flat) > 0).view(tokens.shape)
            found = torch.where(occurred, self._repeated(found), found)
        return scores.scatter(2, tokens, self._lowered(found, count))

    def _drafted(self, branches: Branches) -> Tensor | None:
        """Returns the tokens drafted before each node, ``[B, m, D]``, -1 where there is none that
        can occur again; None where no node has any."""
        if not branches.tokens.shape[2]:
            return None
        # What stands where `valid` is false may be anything, and a smaller vocabulary than the
        # target's may lack a token.
        known = branches.valid & (branches.tokens < self._vocabulary)
        return branches.tokens.where(known, -1)

    def _repeated(self, scores: Tensor) -> Tensor:
        """Returns the scores of tokens that have occurred under the repetition penalty, which the
        prompt's tokens have, too."""
        assert self._repetition is not None
        penalty = self._repetition.to(scores.dtype)
        return torch.where(scores < 0, scores * penalty, scores / penalty)

    def _lowered(self, scores: Tensor, count: Tensor) -> Tensor:
        """Returns scores under the frequency and the presence penalty. count: how often each of
        the tokens stands in the output."""
        if self._frequency is not None:
            scores = scores - self._frequency.to(scores.dtype) * count
        if self._presence is not None:
            scores = scores - self._presence.to(scores.dtype) * count.clamp(max=1)
        return scores


def column(values: Sequence[float | None], off: float, device: torch.device) -> Tensor | None:
    """Returns one number of each row as ``[B, 1, 1]`` float64, or None where all are ``off`` or
    unset, which changes nothing."""
    filled = [off if value is None else value for value in values]
    if all(value == off for value in filled):
        return None
    return torch.tensor(filled, dtype=torch.float64, device=device)[:, None, None]
