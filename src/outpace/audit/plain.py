"""Checks of a finished text against plain decoding: each of its tokens, and where it ends.

A greedy token is the best by the logits after all options; a coupled one the best by log p plus the
noise of its position. In both cases it is a question of scores, and of two tokens one can say by
how much one is better.

Two texts that agree, with and without speculation, may both be wrong. So each text without
speculation is read by the model in one forward, with the prompt in front of it (teacher forcing),
and at every position the token that stands there must be the one that the forward chooses, or as
good as that up to rounding. The text must also end where its options say, and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outpace.core.gumbel import gumbel
from outpace.core.logits_pipeline import Branches, History, LogitsPipeline, RowFault, RowOptions
from outpace.core.params import SamplingParams
from outpace.outputs import CompletionOutput
from outpace.targets.base import Target


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
            scores = self._maker(self._params).process_logits(*self._inputs(logits, past))[0, 0]
        return float(scores[one] - scores[other])

    def best(self, logits: Tensor, past: Sequence[int]) -> int:
        """Returns the token that is chosen after the text ``past``. logits: ``[V']`` after it."""
        inputs = self._inputs(logits, past)
        if not self.coupled:
            return int(self._maker(self._params).process_logits(*inputs).argmax())
        distribution = self._maker(self._params)(*inputs)[0, 0]
        return int((distribution.log() + self._noise(past, len(distribution))).argmax())

    @property
    def allowance(self) -> float:
        """The greatest gap that rounding can explain."""
        # A penalty multiplies what rounding does to a logit.
        worst = max(self._params.repetition_penalty or 1.0, 1.0)
        return 2 * self._slack if self.coupled else self.tolerance * worst

    @property
    def _params(self) -> SamplingParams:
        return self.options.params

    @property
    def _slack(self) -> float:
        """What rounding may do to a log-probability: to the logit itself, and to the others."""
        worst = max(self._params.repetition_penalty or 1.0, 1.0)
        return 2 * self.tolerance * worst / (self._params.temperature or 1.0)

    def _coupled_scores(self, logits: Tensor, past: Sequence[int], other: int) -> Tensor:
        # What the options cut off by less than rounding may be in the other way's distribution.
        lifted = logits.clone()
        lifted[other] += 2 * self.tolerance
        relaxed = _relaxed(self._params, self._slack)
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


# -- where a text ends -------------------------------------------------------------------------


@dataclass(frozen=True)
class Ending:
    """What ends a text; ``params`` resolved. Knows nothing of how the engine cuts texts."""

    params: SamplingParams
    eos_ids: tuple[int, ...]
    vocabulary: int
    tokenizer: Any = None

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether the last of these tokens ends the text, given that none before it did."""
        params, last = self.params, tokens[-1]
        if last in self.eos_ids and not params.ignore_eos:
            return True
        if last in params.stop_token_ids or len(tokens) == params.max_tokens:
            return True
        return self._said(tokens)

    def _said(self, tokens: Sequence[int]) -> bool:
        if not self.params.stop_strings or len(tokens) < (self.params.min_tokens or 0):
            return False
        text = self._decode(tokens)
        known = len(self._decode(tokens[:-1]))
        return any(
            text.find(stop, max(0, known - len(stop) + 1)) >= 0 for stop in self.params.stop_strings
        )

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(
            list(tokens), skip_special_tokens=self.params.skip_special_tokens
        )
        return text

    def cut(self, tokens: Sequence[int]) -> list[int]:
        """Returns the tokens up to the first that ends the text."""
        for length in range(1, len(tokens) + 1):
            if self.ends(tokens[:length]):
                return list(tokens[:length])
        return list(tokens)

    def breaches(self, output: CompletionOutput) -> Iterator[str]:
        """Yields, in words, each way in which a finished text is not one of plain decoding."""
        tokens = output.token_ids
        beyond = [token for token in tokens if token >= self.vocabulary]
        if beyond:
            yield f"emits token {beyond[0]}, which the tokenizer does not have"
        if len(self.cut(tokens)) < len(tokens):
            yield f"goes on for {len(tokens) - len(self.cut(tokens))} tokens after its end"
        elif not tokens or not self.ends(tokens):
            yield f"stops after {len(tokens)} tokens for no reason"
        stops = self.params.stop_strings
        if stops and not self.params.include_stop_str_in_output:
            shown = [stop for stop in stops if stop in output.text]
            if shown and len(tokens) > (self.params.min_tokens or 0):
                yield f"shows the stop string {shown[0]!r}"


# -- a finished text against one plain forward of itself ---------------------------------------


@dataclass(frozen=True)
class Deviation:
    """A token that the plain forward of its text would not have chosen, or a wrong end."""

    mode: str
    prompt: int
    position: int
    token: int | None
    """None where the text ends and should go on."""
    best: int | None
    """What the forward chooses; None where nothing may be chosen."""
    gap: float
    """By how much the best token is better than the other."""
    tolerance: float
    reason: str = ""
    """What is wrong with the end of the text, where that is it."""

    @property
    def bug(self) -> bool:
        """Whether rounding cannot explain it."""
        return not self.gap <= self.tolerance

    @property
    def verdict(self) -> str:
        """The finding in words."""
        if self.reason:
            return f"BUG: {self.reason}"
        if self.bug:
            return f"BUG: gap {self.gap:.2g} above tolerance {self.tolerance:.2g}"
        return f"near-tie (gap {self.gap:.2g} below tolerance {self.tolerance:.2g})"


def deviations(
    target: Target, choice: Choice, ending: Ending, number: int, output: CompletionOutput
) -> Iterator[Deviation]:
    """Yields what is wrong with the text that plain decoding made of a prompt, if anything is.

    number: the prompt's, for the report.
    """
    tokens, mode = output.token_ids, "coupled" if choice.coupled else "greedy"
    logits = target.forward_uncached([*choice.prompt, *tokens], last=len(tokens) + 1).double()
    for at, token in enumerate(tokens):
        try:
            best = choice.best(logits[at], tokens[:at])
        except RowFault as fault:
            reason = f"goes on where its options leave no token: {fault}"
            yield Deviation(mode, number, at, token, None, math.inf, 0.0, reason)
            return
        if best != token:
            gap = choice.gap(logits[at], tokens[:at], best, token)
            yield Deviation(mode, number, at, token, best, gap, choice.allowance)
    if output.finish_reason != "error":
        for breach in ending.breaches(output):
            yield Deviation(mode, number, len(tokens), None, None, math.inf, 0.0, breach)
        return
    try:
        best = choice.best(logits[-1], tokens)
    except RowFault:
        return  # no token is left: rightly an error
    reason = f"ends with an error where plain decoding goes on: {output.error}"
    yield Deviation(mode, number, len(tokens), None, best, math.inf, 0.0, reason)
