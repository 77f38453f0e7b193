"""Retrieval from a corpus: how its texts went on after the last tokens of this one.

He et al. 2023, "REST: Retrieval-Based Speculative Decoding" (arXiv 2311.08252).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Le

from outpace.core.options import Reads
from outpace.core.proposal import Drawn, Proposal
from outpace.core.values import shown
from outpace.draft.base import Drafter, Rows, Setup
from outpace.draft.guesses import Guess, deterministic_trees
from outpace.draft.lookup.continuations import likeliest_chain, likeliest_tree
from outpace.draft.lookup.datastore import DEPTH, Datastore, fingerprint_of
from outpace.draft.lookup.matching import MatchOptions
from outpace.errors import ConfigError
from outpace.targets.hf.loading.loaded import Loaded
from outpace.targets.hf.plain import of_texts

COUNTED = 256
"""Places whose continuations are counted: of more, as many evenly from their order."""

REACH = 16
"""Tokens of a continuation, at most."""


def _datastore(name: str, value: Any) -> Any:
    if not isinstance(value, (str, os.PathLike, Datastore)):
        raise ConfigError(
            f"method 'retrieval' needs {name!r}: the folder that `outpace datastore build` has "
            f"written, not {shown(value)}."
        )
    return value


@dataclass(frozen=True, kw_only=True)
class RetrievalOptions(MatchOptions):
    """What a user may set."""

    datastore: Annotated[Any, Reads(_datastore)]
    """The folder that `outpace datastore build` has written."""
    max_token_span: Annotated[int, Ge(1), Le(DEPTH)] = 16


class RetrievalDrafter(Drafter):
    """Looks the last tokens of a row up in a datastore, the longest match there is, and drafts the
    most frequent continuations.

    The datastore never changes, so that what is drafted follows from a row's own text. Rows
    without a match propose nothing.
    """

    name: ClassVar[str] = "retrieval"
    draws: frozenset[Drawn] = frozenset({Drawn.DETERMINISTIC})
    asked_anywhere: bool = True
    trees: bool = True
    default_rule: ClassVar[str] = "match"
    Options: ClassVar[type[Any]] = RetrievalOptions

    def __init__(self, datastore: Datastore, options: RetrievalOptions) -> None:
        self.trees = options.tree
        self.datastore = datastore
        self._options = options

    @classmethod
    def build(cls, setup: Setup) -> RetrievalDrafter:
        """Opens the datastore; ``VocabularyMismatch`` if its tokens are not the target's."""
        options, loaded = setup.options, setup.loaded
        given = options.datastore
        datastore = given if isinstance(given, Datastore) else Datastore.open(given)
        known = loaded.tokenizer is not None and datastore.description.fingerprint is not None
        fingerprint = fingerprint_of(loaded.tokenizer) if known else None
        datastore.check(fingerprint, int(loaded.config.vocab_size))
        return cls(datastore, options)

    @classmethod
    def specimen(cls, loaded: Loaded) -> Mapping[str, Any]:
        """A datastore of what the target itself writes after one or two tokens."""
        vocabulary = loaded.vocabulary
        first = torch.arange(min(64, vocabulary), device=loaded.device)
        texts = torch.stack([first, first.flip(0)], 1)
        with torch.inference_mode():
            for _ in range(24):
                logits = loaded.model(**of_texts(loaded.model, texts), use_cache=False).logits[
                    :, -1
                ]
                texts = torch.cat([texts, logits[:, :vocabulary].argmax(-1, keepdim=True)], 1)
        return {"datastore": Datastore.of(texts.tolist(), vocabulary), "min_token_span": 1}

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        guesses = [self._guess(rows, row, budget) for row, budget in enumerate(budgets)]
        return deterministic_trees(guesses, rows.seeds.device)

    def _guess(self, rows: Rows, row: int, budget: int) -> Guess:
        options = self._options
        if not budget:
            return Guess()
        context = rows.since(row, max(0, rows.length(row) - options.max_token_span))
        found, match = self.datastore.matches(
            context, options.min_token_span, options.max_token_span
        )
        if not found:
            return Guess()
        texts = self.datastore.continuations(found, match, COUNTED, min(budget, REACH))
        grow = likeliest_tree if options.tree else likeliest_chain
        return grow(texts, budget, options.min_token_prob)

    @property
    def nbytes(self) -> int:
        return self.datastore.nbytes
