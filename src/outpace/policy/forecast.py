"""Forecasts of a round's tokens by the size of its draft, and of what a draft model saves in the
rest of a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from outpace.core.request import PerRequest, Request
from outpace.policy.acceptance import COUNT_DECAY, PRIOR_WEIGHT, Ratio

MIN_PREFILL_PAYBACK = 2.3
"""Reading must be repaid this many times by what drafting promises, since texts end early, and
since of several candidates the one that promises most promises too much. With 2.0 replays are .998
times as fast, editing .987."""

PAYBACK_TOKENS = 128
"""Tokens within which that must be repaid. With half of what remains, 64 at most, repaid once,
replays are .996 times as fast, summaries .974."""


PREFILL_DELAY = 0.5
"""Tokens that a text must have for each plain round that reading it takes: it may end at once.
Without this and `TextLengths` replays are .991 times as fast, and an answer of three tokens to a
prompt of 272 takes up to five times as long."""


@dataclass(frozen=True)
class Forecast:
    """What a round is expected to bring and to cost, by how much is drafted."""

    tokens: Mapping[int, float]
    costs: Mapping[int, float]
    """Seconds, or passes of the target where no clock may decide."""
    curve: Sequence[float] = ()
    """Seconds of a round by the nodes that are really drafted in it: chains may end early."""

    @cached_property
    def rates(self) -> Mapping[int, float]:
        """Tokens for the cost."""
        return {size: self.tokens[size] / cost for size, cost in self.costs.items()}

    @cached_property
    def best(self) -> int:
        """The size that promises most."""
        return max(self.rates, key=self.rates.__getitem__)

    @cached_property
    def best_nonzero(self) -> int:
        """The size above 0 that promises most."""
        return max((size for size in self.rates if size), key=self.rates.__getitem__)

    @property
    def gain(self) -> float:
        """How many times as fast as plain decoding the best size is."""
        return self.rates[self.best] / self.rates[0]


SavedPerToken = Callable[[Request], float]
"""How many plain rounds a model is expected to save for each token of a text."""


class TextLengths:
    """How long texts become, as far as it matters for what reading them repays: a mean over those
    that have ended, and one of `PAYBACK_TOKENS` that is assumed."""

    def __init__(self) -> None:
        self._ended = Ratio()

    @property
    def _mean(self) -> float:
        return (PAYBACK_TOKENS + self._ended.part) / (1 + self._ended.whole)

    def note(self, request: Request) -> None:
        """Notes how long a text became, if it has ended."""
        length = min(PAYBACK_TOKENS, len(request.output_ids))
        # One that ends at its limit might have become longer.
        if request.finish_reason == "stop" or (
            request.finish_reason == "length" and length > self._mean
        ):
            self._ended.add(length, 1)

    def is_prefill_repaid(
        self, reading: float, rows: int, request: Request, saved_per_token: float
    ) -> bool:
        """Returns whether drafting in a text is expected to repay that the drafter reads it first:
        `MIN_PREFILL_PAYBACK` times, and once in a text of the usual length. reading: what that
        costs, in plain rounds, during which all rows wait."""
        most = min(PAYBACK_TOKENS, request.remaining) * saved_per_token
        known = max(self._mean, len(request.output_ids))  # a long text has more to come
        usual = min(known, request.remaining) * saved_per_token
        return most > MIN_PREFILL_PAYBACK * reading * rows and usual > reading * rows


# -- what a model saves ----------------------------------------------------------------------------


@dataclass
class Sums:
    """Plain rounds that some tokens were expected to save."""

    tokens: float = 0.0
    saved: float = 0.0  # plain rounds

    def add(self, tokens: float, saved: float, memory: float = 1.0) -> None:
        """Adds some tokens. memory: the share of the earlier ones that is kept."""
        self.tokens = self.tokens * memory + tokens
        self.saved = self.saved * memory + saved

    def rate(self, usual: float) -> float:
        """Returns the plain rounds saved per token. usual: of all texts, as a prior."""
        return (self.saved + PRIOR_WEIGHT * usual) / (self.tokens + PRIOR_WEIGHT)


@dataclass(frozen=True)
class RoundEstimate:
    """What one way to run a round brings and takes."""

    tokens: float
    """Tokens that the round is expected to bring a row."""
    takes: float
    """Time of the round, in plain rounds."""

    @property
    def per_token(self) -> float:
        """Plain rounds for each token."""
        return self.takes / self.tokens


@dataclass(frozen=True)
class RoundComparison:
    """Two ways to run a round: with a draft of the model, and the best one without it."""

    without: RoundEstimate
    model: RoundEstimate
    curve: Sequence[float]
    """Plain rounds that a round of the model takes, by the number of tokens that it drafted."""

    def saved(self, tokens: int, drafted: int | None) -> float:
        """Returns the plain rounds that the model has saved, or would have saved, in a round that
        brought ``tokens`` tokens. drafted: how many tokens the model drafted in it; None where the
        round was run without the model.

        >>> plain, drafting = RoundEstimate(1.2, 1.0), RoundEstimate(3.0, 1.5)
        >>> both = RoundComparison(plain, drafting, [1.0, 1.2, 1.5])
        >>> both.saved(1, drafted=None), both.saved(3, drafted=2), both.saved(1, drafted=2)
        (0.5, 1.0, -0.6666666666666666)
        >>> better = RoundEstimate(tokens=3.0, takes=1.0)
        >>> RoundComparison(better, drafting, both.curve).saved(1, drafted=None)
        0.0
        """
        if drafted is not None:
            took = self.curve[min(drafted, len(self.curve) - 1)]
            return tokens * self.without.per_token - took
        if self.model.per_token >= self.without.per_token:
            return 0.0  # the model would not be chosen
        return self.without.takes - tokens * self.model.per_token


class TextForecast:
    """Forecasts what a draft model saves for each token of a text on top of the look-ups. It has to
    repay that the model reads the text before it drafts."""

    def __init__(self) -> None:
        self._saved: dict[str, Sums] = {}
        self._own = PerRequest[dict[str, Sums]](lambda request: {}, lasting=True)

    def note(self, request: Request, model: str, tokens: int, saved: float) -> None:
        """Notes a round of a text: the tokens that it brought, and the plain rounds that a model
        saved, or would have saved."""
        if not tokens:  # of a text that was aborted meanwhile
            return
        every = self._saved.setdefault(model, Sums())
        every.add(tokens, saved, COUNT_DECAY**tokens)
        self._own[request].setdefault(model, Sums()).add(tokens, saved)

    def knows(self, model: str) -> bool:
        """Returns whether anything was noted of a model."""
        return model in self._saved

    def saves(self, request: Request, model: str) -> float:
        """Returns the plain rounds that a model is expected to save for each token of a text, if it
        `knows` anything. Never less than 0, since it need not draft.

        It is a mean over tokens: in a mean over rounds a long copied draft would weigh no more than
        a single token.
        """
        every, own = self._saved[model], self._own[request].get(model, Sums())
        return max(0.0, own.rate(every.saved / every.tokens))

    def to_dict(self) -> dict[str, Any]:
        """Returns what is known of all texts together, for a later run."""
        return {name: {"all": [sums.tokens, sums.saved]} for name, sums in self._saved.items()}

    def from_dict(self, saved: Mapping[str, Any]) -> None:
        """Goes on from what an earlier run saved."""
        known = {name: map(float, sums["all"]) for name, sums in saved.items()}
        found = {name: Sums(tokens, rounds) for name, (tokens, rounds) in known.items()}
        self._saved = {name: sums for name, sums in found.items() if sums.tokens}
