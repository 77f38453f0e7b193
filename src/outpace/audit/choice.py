"""How plain decoding chooses a token from logits, and how near another token comes to it.

A greedy token is the best by the logits after all options; a coupled one the best by log p plus the
noise of its position. In both cases it is a question of scores, and of two tokens one can say by
how much one is better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outpace.core.gumbel import gumbel
from outpace.core.logits_pipeline import Branches, History, LogitsPipeline, RowOptions
from outpace.core.params import SamplingParams


@dataclass(frozen=True)
class Choice:
    """What chooses the tokens of one text.

    coupled: by log p plus noise, otherwise greedily. options: the request's, resolved. tolerance:
    how much rounding may change a logit.
    """

    coupled: bool
    prompt: Sequence[int]
    options: RowOptions
    vocabulary: int
    tolerance: float

    def gap(self, logits: Tensor, past: Sequence[int], one: int, other: int) -> float:
        """Returns by how much the first token is better than the other, after the text ``past``.

        logits: ``[V']`` after that text. ``other`` is given the benefit of rounding where an option
        may have cut it off by less than that.
        """
        if other >= self.vocabulary:
            return math.inf
        if self.coupled:
            scores = self._coupled_scores(logits, past, other)
        else:
            scores = self._maker(self._params).adjusted(*self._inputs(logits, past))[0, 0]
        return float(scores[one] - scores[other])

    def best(self, logits: Tensor, past: Sequence[int]) -> int:
        """Returns the token that is chosen after the text ``past``. logits: ``[V']`` after it."""
        inputs = self._inputs(logits, past)
        if not self.coupled:
            return int(self._maker(self._params).adjusted(*inputs).argmax())
        distribution = self._maker(self._params)(*inputs)[0, 0]
        return int((distribution.log() + self._noise(past, len(distribution))).argmax())

    @property
    def allowance(self) -> float:
        """The greatest gap that rounding can explain."""
        # A penalty multiplies what rounding does to a logit.
        worst = max(self._params.repetition_penalty or 1.0, 1.0)
        return 2 * self._law_slack if self.coupled else self.tolerance * worst

    @property
    def _params(self) -> SamplingParams:
        return self.options.params

    @property
    def _law_slack(self) -> float:
        """What rounding may do to a log-probability: to the logit itself, and to the others."""
        worst = max(self._params.repetition_penalty or 1.0, 1.0)
        return 2 * self.tolerance * worst / (self._params.temperature or 1.0)

    def _coupled_scores(self, logits: Tensor, past: Sequence[int], other: int) -> Tensor:
        # What the options cut off by less than rounding may be in the other way's distribution.
        lifted = logits.clone()
        lifted[other] += 2 * self.tolerance
        relaxed = _relaxed(self._params, self._law_slack)
        distribution = self._maker(relaxed)(*self._inputs(lifted, past))[0, 0]
        return distribution.log() + self._noise(past, len(distribution))

    def _noise(self, past: Sequence[int], vocabulary: int) -> Tensor:
        position = torch.tensor(len(self.prompt) + len(past))
        return gumbel(torch.tensor(self._params.seed or 0), position, vocabulary)

    def _inputs(self, logits: Tensor, past: Sequence[int]) -> tuple[Tensor, Branches, History]:
        return logits[None, None].cpu(), Branches.root(1), History([self.prompt], [past])

    def _maker(self, params: SamplingParams) -> LogitsPipeline:
        return LogitsPipeline([replace(self.options, params=params)], self.vocabulary)


def _relaxed(params: SamplingParams, slack: float) -> SamplingParams:
    """Returns the params with truncation that lets a little more through."""
    return replace(
        params,
        top_p=min(1.0, (params.top_p or 1.0) + slack),
        min_p=max(0.0, (params.min_p or 0.0) - slack),
        typical_p=min(1.0, (params.typical_p or 1.0) + slack),
    )
