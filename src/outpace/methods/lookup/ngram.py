"""Prompt look-up: what followed the last time these tokens stood here.

Saxena 2023, "Prompt Lookup Decoding"; `prompt_lookup_num_tokens` in transformers, "ngram" in vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le

from outpace.core.options import Options
from outpace.core.proposal import Capabilities, DraftSampling, Proposal
from outpace.core.request import PerRequest, Request
from outpace.core.values import is_integer
from outpace.draft.base import Drafter, Rows, Setup
from outpace.draft.token_trees import TokenTree, deterministic_trees
from outpace.errors import ConfigError
from outpace.methods.lookup.prediction import Predictions
from outpace.targets.hf.loading.loaded import LoadedModel

LONGEST = 64
"""Tokens that a look-up may compare: each size costs a table entry per token of the text, and texts
that repeat n tokens also repeat the last few of them."""


class _Index:
    """Where each n-gram of one row was last followed by something, updated as tokens arrive."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._after: dict[tuple[int, ...], int] = {}
        self.ids: list[int] = []
        self.before = 0
        """How many of them stand before the text: those of its source."""

    @property
    def read(self) -> int:
        """Tokens of the text that are indexed."""
        return len(self.ids) - self.before

    def learn_source(self, tokens: Sequence[int]) -> None:
        """Indexes what the text is made from: summaries and translations copy from it."""
        self.learn(list(tokens))
        self.before = len(self.ids)

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


@dataclass(frozen=True, kw_only=True)
class NgramOptions(Options):
    """What a user may set."""

    prompt_lookup_max: Annotated[int, Ge(1), Le(LONGEST)] = 4
    """Tokens of the longest n-gram that is looked up."""
    prompt_lookup_min: Annotated[int, Ge(1), Le(LONGEST)] = 2
    """Tokens of the shortest n-gram that is looked up."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min={self.prompt_lookup_min} must not be above "
                f"prompt_lookup_max={self.prompt_lookup_max}."
            )


class NgramDrafter(Drafter):
    """Proposes the tokens after the right-most earlier occurrence of the row's last n tokens.

    The text that was predicted for the row goes first, where it says as many.

    The source of an encoder-decoder counts as standing before the row's text.
    The longest n from ``prompt_lookup_max`` down to ``prompt_lookup_min`` that occurs is used. Rows
    without an occurrence propose nothing, which costs nothing.
    """

    name: ClassVar[str] = "ngram"
    sampling_kinds: frozenset[DraftSampling] = frozenset({DraftSampling.DETERMINISTIC})
    capabilities: Capabilities = Capabilities(stateless=True, takes_predictions=True)
    Options: ClassVar[type[Any]] = NgramOptions

    def __init__(self, options: NgramOptions) -> None:
        self._sizes = (options.prompt_lookup_min, options.prompt_lookup_max)
        self._texts = PerRequest(self._new_text)
        self._predictions = Predictions()

    def _new_text(self, request: Request) -> _Index:
        index = _Index(*self._sizes)
        if request.source is not None:
            index.learn_source(request.source.token_ids)
        return index

    @classmethod
    def configure(cls, given: Mapping[str, Any]) -> NgramOptions:
        """Returns its options. As in vLLM, one of the two sizes may be given alone: the other one
        gives way if its default contradicts it."""
        unset = NgramOptions()
        low: Any = given.get("prompt_lookup_min")
        high: Any = given.get("prompt_lookup_max")
        filled = dict(given)
        if is_integer(low):
            longest = min(max(low, unset.prompt_lookup_max), LONGEST)
            filled.setdefault("prompt_lookup_max", longest)
        if is_integer(high):
            shortest = max(min(high, unset.prompt_lookup_min), 1)
            filled.setdefault("prompt_lookup_min", shortest)
        options: NgramOptions = super().configure(filled)
        return options

    @classmethod
    def build(cls, setup: Setup) -> NgramDrafter:
        return cls(setup.options)

    @classmethod
    def dummy_options(cls, loaded: LoadedModel) -> Mapping[str, Any]:
        return {"prompt_lookup_min": 1}

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        guesses = []
        for row, (request, budget) in enumerate(zip(rows.requests, budgets, strict=True)):
            index = self._texts[request]
            index.learn(rows.since(row, index.read))
            predicted = self._predictions.guess(rows, row, budget)
            found = TokenTree.chain(index.follow(budget) if len(predicted) < budget else [])
            guesses.append(max(predicted, found, key=len))
        return deterministic_trees(guesses, rows.seeds.device)
