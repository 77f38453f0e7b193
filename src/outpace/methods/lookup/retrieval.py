"""Retrieval from a corpus: how its texts went on after the last tokens of this one.

He et al. 2023, "REST: Retrieval-Based Speculative Decoding" (arXiv 2311.08252).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le

from outpace.core.options import Reads
from outpace.core.proposal import Capabilities, DraftSampling, Proposal
from outpace.draft.base import Drafter, Rows, Setup
from outpace.draft.token_trees import TokenTree, deterministic_trees
from outpace.errors import ConfigError
from outpace.methods.lookup.continuations import likeliest_chain, likeliest_tree
from outpace.methods.lookup.datastore import DEPTH, Datastore, read_datastore
from outpace.methods.lookup.dummy_datastore import dummy_datastore
from outpace.methods.lookup.matching import MatchOptions
from outpace.targets.hf.loading.loaded import LoadedModel

MAX_CONTINUATIONS = 256
"""Places whose continuations are counted: of more, as many evenly from their order."""

REACH = 16
"""Tokens of a continuation, at most."""


@dataclass(frozen=True, kw_only=True)
class RetrievalOptions(MatchOptions):
    """What a user may set."""

    datastore: Annotated[Any, Reads(read_datastore)]
    """The folder that `outpace datastore build` has written."""
    max_token_span: Annotated[int, Ge(1), Le(DEPTH)] = 16


class RetrievalDrafter(Drafter):
    """Looks the last tokens of a row up in a datastore, the longest match there is, and drafts the
    most frequent continuations.

    The datastore never changes, so that what is drafted follows from a row's own text. Rows
    without a match propose nothing.
    """

    name: ClassVar[str] = "retrieval"
    sampling_kinds: frozenset[DraftSampling] = frozenset({DraftSampling.DETERMINISTIC})
    capabilities: Capabilities = Capabilities(stateless=True)
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
        options = setup.options
        datastore = Datastore.for_target(options.datastore, setup.loaded)
        if not datastore.has_texts:
            raise ConfigError(
                "the datastore holds no texts, only the table of their n-grams: build it without "
                "--no-texts for the method 'retrieval', or give it to 'suffix' or 'recycling'."
            )
        return cls(datastore, options)

    @classmethod
    def dummy_options(cls, loaded: LoadedModel) -> Mapping[str, Any]:
        return {"datastore": dummy_datastore(loaded), "min_token_span": 1}

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        guesses = [self._guess(rows, row, budget) for row, budget in enumerate(budgets)]
        return deterministic_trees(guesses, rows.seeds.device)

    def _guess(self, rows: Rows, row: int, budget: int) -> TokenTree:
        options = self._options
        if not budget:
            return TokenTree()
        context = rows.since(row, max(0, rows.lengths[row] - options.max_token_span))
        found, match = self.datastore.matches(
            context, options.min_token_span, options.max_token_span
        )
        if not found:
            return TokenTree()
        texts = self.datastore.continuations(found, match, MAX_CONTINUATIONS, min(budget, REACH))
        grow = likeliest_tree if options.tree else likeliest_chain
        return grow(texts, budget, options.min_token_prob)

    @property
    def nbytes(self) -> int:
        return self.datastore.nbytes
