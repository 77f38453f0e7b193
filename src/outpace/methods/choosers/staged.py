"""A look-up drafts for the draft model, and the draft model for the target.

Spector and Re 2023, "Accelerating LLM inference with staged speculative decoding"
(arXiv 2308.04623).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from outpace.core.proposal import Proposal
from outpace.core.request import Request
from outpace.draft.base import Drafter, Round, Rows, Setup
from outpace.draft.chains import Chains
from outpace.draft.state import StateFile
from outpace.draft.token_trees import token_trees_of
from outpace.errors import ConfigError
from outpace.heads.classifiers import ModelSignature
from outpace.methods.choosers.base import check_config, check_look_up
from outpace.methods.models.draft_model import DraftModel
from outpace.methods.models.options import AUTO, SAME, DraftModelOptions
from outpace.targets.hf.loading.loaded import LoadedModel


@dataclass(frozen=True, kw_only=True)
class StagedOptions(DraftModelOptions):
    """What a user may set."""

    lookup: Any = field(default_factory=lambda: {"method": "ngram"})
    """What drafts for the draft model, as a speculative_config."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocabulary not in (AUTO, SAME):
            raise ConfigError(
                f"vocabulary cannot be {self.vocabulary!r} for method 'staged', whose look-up "
                "guesses the draft model's own tokens: use a model with the target's tokenizer, or "
                "method 'draft_model'."
            )
        check_config("staged", self.lookup)


class Staged(DraftModel):
    """A draft model that scores a look-up's guess in the pass that it reads the text with.

    What it drafts is what it drafts alone, token by token from its own distributions: where a drawn
    token is the one that had been guessed, the next distribution is there already, and a pass is
    saved. In a batch that lasts until the first row leaves its guess.
    """

    name: ClassVar[str] = "staged"
    Options: ClassVar[type[Any]] = StagedOptions
    lookup: Drafter

    @classmethod
    def _built(cls, setup: Setup) -> Staged:
        same = replace(setup.options, vocabulary=SAME)
        drafter = super()._built(replace(setup, options=same))
        assert isinstance(drafter, Staged)
        drafter.lookup = setup.child(setup.options.lookup)
        check_look_up("lookup", drafter.lookup)
        if drafter.lookup.needs.hidden_layers:
            raise ConfigError(
                f"lookup cannot be {drafter.lookup.name!r}, which reads the target's states, and "
                "a look-up of method 'staged' is not given them: choose another one."
            )
        drafter.needs = replace(drafter.needs, softmax_probs=drafter.lookup.needs.softmax_probs)
        can = drafter.lookup.capabilities
        drafter.capabilities = replace(
            drafter.capabilities, takes_predictions=can.takes_predictions, saves=can.saves
        )
        return drafter

    @classmethod
    def dummy_options(cls, loaded: LoadedModel) -> Mapping[str, Any]:
        return {
            **super().dummy_options(loaded),
            "lookup": {"method": "ngram", "prompt_lookup_min": 1},
        }

    def check(self, request: Request) -> None:
        super().check(request)
        self.lookup.check(request)

    def begin(self, requests: Sequence[Request]) -> None:
        super().begin(requests)
        self.lookup.begin(requests)

    def end(self, requests: Sequence[Request], interrupted: bool = False) -> None:
        super().end(requests, interrupted)
        self.lookup.end(requests, interrupted)

    def forget_texts(self) -> None:
        super().forget_texts()
        self.lookup.forget_texts()

    def files(self) -> Iterator[StateFile]:
        yield from self.lookup.files()

    def save(self, folder: Path) -> None:
        """Writes what the look-up has learned."""
        if not self.capabilities.saves:
            super().save(folder)
        self.lookup.save(folder)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.lookup.nbytes

    def observe(self, round: Round) -> None:
        super().observe(round)
        self.lookup.observe(round)

    def model_signature(self) -> ModelSignature | None:
        return None

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        counts = self._draft_counts(rows, budgets)
        if not any(counts):
            return Proposal.empty(len(rows), rows.seeds.device)
        live = [count > 0 for count in counts]
        # The last token of a draft is never fed, so that guessing it would save nothing.
        guesses = self._guesses(rows, [max(0, count - 1) for count in counts])
        scored, _ = self._feed(live, guesses)  # [B, 1 + L, V]
        chains = Chains(rows, counts, self.random_stream)
        logits = scored[:, 0]
        guessed = 0  # tokens of the draft that all rows have as they were guessed
        while chains.grow(logits):
            drawn = chains.tokens[:, -1]
            if guessed == chains.length - 1 and self._as_guessed(drawn, guesses, live, guessed):
                guessed += 1
                logits = scored[:, guessed]
            else:
                logits = self._score(self._readable(drawn[:, None]), keep=1)[0][:, -1]
            self.runner.advance([int(row) for row in live])
        return chains.proposal(self._tree_levels.chain(len(rows), chains.length))

    def _guesses(self, rows: Rows, budgets: Sequence[int]) -> list[list[int]]:
        if not any(budgets):
            return [[] for _ in budgets]
        guessed = token_trees_of(self.lookup.propose(rows, budgets))
        # A look-up may find tokens that the draft model does not have.
        chains = [nodes.eldest_chain() for nodes in guessed]
        return [list(itertools.takewhile(lambda t: t < self._own_size, one)) for one in chains]

    def _as_guessed(
        self, drawn: Tensor, guesses: Sequence[Sequence[int]], live: Sequence[bool], place: int
    ) -> bool:
        """Whether every row's new token is the one that was guessed at this place of its draft."""
        return all(
            len(guess) > place and guess[place] == token
            for token, guess, drafting in zip(drawn.tolist(), guesses, live, strict=True)
            if drafting
        )
