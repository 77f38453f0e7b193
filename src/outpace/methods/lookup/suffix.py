"""Suffix decoding: how texts went on after the longest context that they share with this one.

Oliaro et al. 2024, "SuffixDecoding" (arXiv 2411.04975); the options are named as in vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Le

from outpace.core.options import Options, Reads
from outpace.core.proposal import Capabilities, DraftSampling, Proposal
from outpace.core.request import PerRequest, Request
from outpace.draft.base import Drafter, Round, Rows, Setup
from outpace.draft.token_trees import TokenTree, deterministic_trees, merged
from outpace.errors import ConfigError
from outpace.methods.lookup.continuations import likeliest_chain, likeliest_tree
from outpace.methods.lookup.datastore import Datastore, identity, read_datastore
from outpace.methods.lookup.dummy_datastore import dummy_datastore
from outpace.methods.lookup.growing_text import GrowingText
from outpace.methods.lookup.matching import DEEPEST
from outpace.methods.lookup.occurrences import Occurrences
from outpace.methods.lookup.past import PastTexts
from outpace.methods.lookup.prediction import Predictions
from outpace.methods.lookup.table import NgramTable
from outpace.targets.hf.loading.loaded import LoadedModel

MAX_CONTINUATIONS = 64
"""Places, the latest ones, whose continuations are counted."""

LEAST = 0.2
"""The chance of a whole chain below which it ends, with a datastore: what pays where a column more
costs a tenth of a pass."""


@dataclass(frozen=True, kw_only=True)
class SuffixOptions(Options):
    """What a user may set."""

    suffix_decoding_max_tree_depth: Annotated[int, Ge(1), Le(DEEPEST)] = 24
    """Tokens of the longest match."""
    suffix_decoding_max_spec_factor: Annotated[float, Ge(0), Le(100)] = 1.0
    """Tokens to draft for each token that matches."""
    suffix_decoding_min_token_prob: Annotated[float, Ge(0), Le(1)] = 0.1
    """The chance, by frequency, below which a token is not drafted. With a datastore a chain ends
    where the chance of all of it falls below this, or below 0.2."""
    suffix_decoding_max_cached_requests: Annotated[int, Ge(0), Le(10**9)] = 10_000
    """Finished texts that are kept for others; 0: each request knows itself only."""
    max_cached_tokens: Annotated[int, Ge(0), Le(10**9)] = 1_000_000
    """Tokens of these texts, at most; each takes some 20 bytes."""
    tree: bool = False
    """Whether several continuations are drafted at once."""
    datastore: Annotated[Any, Reads(read_datastore)] = None
    """The folder that `outpace datastore build` or `LLM.save_drafter` has written: it says what
    comes next where it is surer than a match."""


class SuffixDrafter(Drafter):
    """Looks for the last tokens of a row in the text that was predicted for it, in its own text and
    in the outputs of finished requests.

    Of all lengths of a match that one is taken whose draft promises most tokens: each node counts
    with the product of relative frequencies on its path. A draft from a text is no longer than the
    match times ``suffix_decoding_max_spec_factor``. Rows whose text must follow from their own
    history alone do not look into other requests' outputs. Rows without a match propose nothing.

    A datastore, which never changes, takes part for all rows: with its texts, as finished requests
    do, and with the table of their n-grams. Each next token is the match's or the table's,
    whichever is surer, as long as the chain stays likely enough.
    """

    name: ClassVar[str] = "suffix"
    sampling_kinds: frozenset[DraftSampling] = frozenset({DraftSampling.DETERMINISTIC})
    capabilities: Capabilities = Capabilities(stateless=True, takes_predictions=True, saves=True)
    default_rule: ClassVar[str] = "match"
    Options: ClassVar[type[Any]] = SuffixOptions
    max_draft_tokens: int = 16

    def __init__(
        self,
        options: SuffixOptions,
        datastore: Datastore | None = None,
        target: LoadedModel | None = None,
    ) -> None:
        """target: the model whose tokens they are, without which nothing can be saved."""
        self.trees = options.tree
        self._datastore, self._target = datastore, target
        self._options = options
        self._depth = options.suffix_decoding_max_tree_depth
        self._grow = likeliest_tree if options.tree else likeliest_chain
        self._texts = PerRequest(lambda request: GrowingText(self._depth))
        self._predictions = Predictions()
        self._kept = PerRequest(lambda request: 0, lasting=True)
        """How many tokens of its output, from the first one on, are in the store."""
        self.past = PastTexts(
            self._depth, options.suffix_decoding_max_cached_requests, options.max_cached_tokens
        )

    @classmethod
    def build(cls, setup: Setup) -> SuffixDrafter:
        given = setup.options.datastore
        datastore = None if given is None else Datastore.for_target(given, setup.loaded)
        return cls(setup.options, datastore, setup.loaded)

    @classmethod
    def dummy_options(cls, loaded: LoadedModel) -> Mapping[str, Any]:
        known = dummy_datastore(loaded).without_texts()
        return {"tree": True, "suffix_decoding_max_spec_factor": 4.0, "datastore": known}

    def end(self, requests: Sequence[Request], interrupted: bool = False) -> None:
        if interrupted:  # nothing has ended, and what is known of the texts may be incomplete
            self.past.recover()
            return
        for request in requests:  # it has ended, or was preempted and will go on
            output = self._texts[request].output()
            self.past.add(output[self._kept[request] :])
            self._kept[request] = max(self._kept[request], len(output))

    def forget_texts(self) -> None:
        self.past.clear()

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        guesses = [self._guess(rows, row, budget) for row, budget in enumerate(budgets)]
        made = deterministic_trees(guesses, rows.seeds.device)
        confidence = [guess.confidence for guess in guesses] if made.tree.is_chain else ()
        return replace(made, confidence=confidence)

    def observe(self, round: Round) -> None:
        # A row that drafts nothing for a while must not have much to catch up with.
        for row, request in enumerate(round.requests):
            self._texts[request].catch_up(round.rows, row)
            self._predictions.catch_up(round.rows, row)

    def _guess(self, rows: Rows, row: int, budget: int) -> TokenTree:
        if not budget:
            return TokenTree()
        predicted = self._predictions.guess(rows, row, budget)
        if len(predicted) == budget:
            return predicted
        found = self._found(rows, row, budget)
        surer = predicted and predicted.expected_tokens >= found.expected_tokens
        return predicted if surer else found

    def _found(self, rows: Rows, row: int, budget: int) -> TokenTree:
        """Returns the most promising draft of the row's own text and those of others."""
        text = self._texts[rows.requests[row]]
        text.catch_up(rows, row)
        context = text.last(self._depth)
        found, _ = self._best(text.occurrences, context, budget)
        if self.past and not rows.is_reproducible(row):
            others, place = self._best(self.past.occurrences, context, budget)
            if others.expected_tokens > found.expected_tokens:
                self.past.touch(place)
                found = others
        if self._datastore is None:
            return found
        return self._with(self._datastore, found, context, budget)

    def _with(
        self, store: Datastore, found: TokenTree, context: list[int], budget: int
    ) -> TokenTree:
        """Returns what a datastore makes of what was found elsewhere."""
        places, length = store.matches(context, 1, self._depth)
        if len(places):
            nodes = min(budget, int(length * self._options.suffix_decoding_max_spec_factor))
            texts = store.continuations(places, length, MAX_CONTINUATIONS, nodes)
            stored = self._grow(texts, nodes, self._options.suffix_decoding_min_token_prob)
            stored.confidence = _confidences(stored, length)
            found = max(found, stored, key=lambda guess: guess.expected_tokens)
        if self.trees:
            return merged(
                [found, self._likelier(store.table, TokenTree(), context, budget)], budget
            )
        return self._likelier(store.table, found, context, budget)

    def _likelier(
        self, table: NgramTable, match: TokenTree, context: list[int], nodes: int
    ) -> TokenTree:
        """Returns the chain in which each token is the match's or the table's, whichever is surer;
        the table's alone once the chain has left the match, or gone past its end."""
        least = max(LEAST, self._options.suffix_decoding_min_token_prob)
        chain, chance, text = TokenTree(), 1.0, list(context)
        following = list(zip(match.tokens, match.confidence, strict=True))
        for place in range(nodes):
            token, sure = table.after(text) or (-1, 0.0)
            if place < len(following):
                said, surer = following[place]
                if surer >= sure:
                    token, sure = said, surer
                elif said != token:
                    following = []
            chance *= sure
            if chance < least:
                break
            chain.add(token, place, chance)
            chain.confidence.append(sure)
            text.append(token)
        return chain

    def _best(self, where: Occurrences, context: list[int], budget: int) -> tuple[TokenTree, int]:
        """Returns the most promising draft and a place that it was found at."""
        best, at = TokenTree(), 0
        places, agree = where.matches(context)
        for length in np.bincount(agree).nonzero()[0][::-1].tolist():
            nodes = min(budget, int(length * self._options.suffix_decoding_max_spec_factor))
            if nodes <= best.expected_tokens:  # a token promises one at most
                break
            found = places[agree >= length][:MAX_CONTINUATIONS]
            texts = where.continuations(found, nodes)
            guess = self._grow(texts, nodes, self._options.suffix_decoding_min_token_prob)
            if guess.expected_tokens > best.expected_tokens:
                best, at = guess, int(found[0])
                best.confidence = _confidences(guess, length)
        return best, at

    def save(self, folder: Path) -> None:
        """Writes a datastore of the texts that are kept, and what a given one held; no more than
        ``max_cached_tokens`` of texts."""
        room = self._options.max_cached_tokens
        texts: list[Any] = list(self.past.texts())
        if self._datastore is not None:
            texts = [*self._datastore.texts(), *texts]
        kept: list[Any] = []
        for text in reversed(texts):
            room -= len(text) + 1
            if room < 0:
                kept += [] if kept else [text[-room:]]  # at least the end of the latest
                break
            kept.append(text)
        if not kept or self._target is None:
            raise ConfigError(
                "the method 'suffix' has nothing to save: no text has ended yet, or none is kept."
            )
        made = Datastore.of(kept[::-1], *identity(self._target))
        if self._datastore is not None:
            made = made.with_table(made.table.with_more(self._datastore.table))
        made.save(folder)

    @property
    def nbytes(self) -> int:
        texts = sum(text.occurrences.nbytes for text in self._texts.values())
        known = self._datastore.nbytes if self._datastore is not None else 0
        return texts + self.past.occurrences.nbytes + known


def _confidences(guess: TokenTree, matched: int) -> list[float]:
    """How sure a match of n tokens is of each token that it drafts: the more often the token came
    next, and the longer the match is, to which the draft before it belongs.

    >>> _confidences(TokenTree([5, 6], [0, 1], chances=[1.0, 0.5]), 2)
    [0.5, 0.3]
    """
    before = [1.0, *guess.chances]
    return [
        chance / before[place] * (matched + place) / (matched + place + 2)
        for place, chance in enumerate(guess.chances)
    ]
