"""Consensus: the samples of one prompt draft for each other.

Li et al. 2025, "Speculative decoding for multi-sample inference" (arXiv 2503.05330).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Le

from outpace.core.proposal import Capabilities, DraftSampling, Proposal
from outpace.core.request import PerRequest, Request
from outpace.draft.base import Drafter, Round, Rows, Setup
from outpace.draft.token_trees import TokenTree, deterministic_trees
from outpace.methods.lookup.continuations import likeliest_chain, likeliest_tree
from outpace.methods.lookup.growing_text import GrowingText
from outpace.methods.lookup.matching import MatchOptions
from outpace.targets.hf.loading.loaded import LoadedModel

KEPT = 16
"""Groups that are kept while none of their samples is in the batch: more may be waiting."""


@dataclass(frozen=True, kw_only=True)
class ConsensusOptions(MatchOptions):
    """What a user may set."""

    min_token_prob: Annotated[float, Ge(0), Le(1)] = 0.1
    """The share of the samples' votes below which a token is not drafted."""


@dataclass(frozen=True)
class _Vote:
    """How one sample went on where it agreed best with a context."""

    agree: int
    """Tokens of the context that stood before it there."""
    sample: GrowingText
    place: int

    def continuation(self, length: int) -> list[int]:
        (found,) = self.sample.occurrences.continuations(np.array([self.place]), length)
        return found


class ConsensusDrafter(Drafter):
    """Asks all samples of a row's prompt (``n`` > 1) how they went on after its last tokens.

    Each sample has one vote: what followed the longest match in its text, the latest one of equal
    ones. The row's own text votes, too, and its prompt counts as its own. A node's chance is the
    product of the shares of votes on its path, and a draft is no deeper than its match. Of all
    lengths of a match that one is taken whose draft promises most tokens. Rows without a match
    propose nothing.

    The samples stay independent of each other: the tokens of a draft are given once the others'
    texts are, and each of them is verified with the row's own distribution and the row's own random
    numbers. Rows whose text must follow from their own history alone (those with a seed) ask
    themselves only.
    """

    name: ClassVar[str] = "consensus"
    sampling_kinds: frozenset[DraftSampling] = frozenset({DraftSampling.DETERMINISTIC})
    capabilities: Capabilities = Capabilities(stateless=True)
    trees: bool = True
    default_rule: ClassVar[str] = "match"
    Options: ClassVar[type[Any]] = ConsensusOptions

    def __init__(self, options: ConsensusOptions) -> None:
        self.trees = options.tree
        self._options = options
        self._grow = likeliest_tree if options.tree else likeliest_chain
        self._texts = PerRequest(lambda request: GrowingText(options.max_token_span))
        self._present: list[Request] = []
        self._groups: dict[Hashable, dict[int, GrowingText]] = {}  # by id; ended samples, too

    @classmethod
    def build(cls, setup: Setup) -> ConsensusDrafter:
        return cls(setup.options)

    @classmethod
    def dummy_options(cls, loaded: LoadedModel) -> Mapping[str, Any]:
        return {"min_token_span": 1}

    def begin(self, requests: Sequence[Request]) -> None:
        self._present += requests
        for request in requests:
            if request.group is not None:
                self._groups.setdefault(request.group, {})[request.id] = self._texts[request]

    def end(self, requests: Sequence[Request], interrupted: bool = False) -> None:
        if interrupted:  # what is known of the texts may be incomplete
            self._present, self._groups = [], {}
            return
        self._present = [one for one in self._present if one not in requests]
        present = {request.group for request in self._present}
        absent = [key for key in self._groups if key not in present]
        for key in absent[: max(0, len(absent) - KEPT)]:
            del self._groups[key]

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        self._catch_up(rows)
        guesses = [self._guess(rows, row, budget) for row, budget in enumerate(budgets)]
        return deterministic_trees(guesses, rows.seeds.device)

    def observe(self, round: Round) -> None:
        # A row that drafts nothing for a while must not have much to catch up with.
        self._catch_up(round.rows)

    def _catch_up(self, rows: Rows) -> None:
        for row, request in enumerate(rows.requests):
            self._texts[request].catch_up(rows, row)

    def _guess(self, rows: Rows, row: int, budget: int) -> TokenTree:
        if not budget:
            return TokenTree()
        alone = rows.is_reproducible(row)
        votes = self._votes(rows.requests[row], alone)
        best = TokenTree()
        for length in sorted({vote.agree for vote in votes}, reverse=True):
            if length <= best.expected_tokens:  # a level promises one token at most
                break
            agreeing = [vote for vote in votes if vote.agree >= length]
            texts = [vote.continuation(min(length, budget)) for vote in agreeing]
            guess = self._grow(texts, budget, self._options.min_token_prob)
            if guess.expected_tokens > best.expected_tokens:
                best = guess
        return best

    def _votes(self, request: Request, alone: bool) -> list[_Vote]:
        """The votes of those who have one, the own text's first."""
        own = self._texts[request]
        group = {} if alone else self._groups.get(request.group, {})
        found = []
        context = own.last(self._options.max_token_span)
        for sample in [own, *(text for text in group.values() if text is not own)]:
            places, agree = sample.occurrences.matches(context)
            if sample is not own:  # the prompt is the same: one vote for it is enough
                after = places >= sample.begin_of_output
                places, agree = places[after], agree[after]
            if len(places) and (most := int(agree.max())) >= self._options.min_token_span:
                found.append(_Vote(most, sample, int(places[agree.argmax()])))
        return found

    @property
    def nbytes(self) -> int:
        texts = {id(text): text for text in self._texts.values()}
        # Copies of the lists, because another thread may be writing.
        for group in list(self._groups.values()):
            texts.update({id(text): text for text in list(group.values())})
        return sum(text.occurrences.nbytes for text in texts.values())
