"""A draft model with another tokenizer than the target's.

Timor et al. 2025, "Accelerating LLM inference with lossless speculative decoding algorithms for
heterogeneous vocabularies" (arXiv 2502.05202).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from outpace.core.proposal import Capabilities
from outpace.draft.base import Round, Rows
from outpace.errors import VocabularyMismatch
from outpace.heads.classifiers import ModelSignature
from outpace.methods.models.draft_model import DraftModel
from outpace.methods.models.draft_text import DraftText
from outpace.methods.models.image_feeder import ModelRow
from outpace.methods.models.images import ImageAccess
from outpace.methods.models.options import AUTO, INTERSECTION
from outpace.methods.models.spelling import coverage, shared_tokens
from outpace.methods.models.translation import RetokenizedText, common_prefix_len
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.runner import Runner

ENOUGH = 0.8
"""Share of a text's tokens, about, that have to be shared ones for `coverage` to suffice: each
drafted token is one of these, and where the target's is another the chain ends."""

UNSETTLED = 32
"""Own tokens at the end of a text, drafts included, up to which more text may change it; where it
changes more, a model with states reads it anew."""


class CrossTokenizerModel(DraftModel):
    """Reads each text in its own tokens.

    These are made from the text anew in every round, and its cache is kept as far as they begin as
    before.
    """

    # Its distributions are of its own tokens, not of the target's.
    capabilities: Capabilities = replace(DraftModel.capabilities, has_probs=False)

    def __init__(
        self, target: LoadedModel, drafter: LoadedModel, runner: Runner, images: ImageAccess
    ) -> None:
        super().__init__(drafter, runner, target.vocabulary, images)
        self._target = target

    def _join(self, row: ModelRow, parent: ModelRow | None) -> None:
        source = self._copied(row, parent)
        if source is None or parent is None:
            self.runner.admit(1, row.request.source)
        else:
            self.runner.fork(source, self.runner.lengths[source])
            row.cached = list(parent.cached)

    def _new_text(self, goes_on: bool) -> DraftText:
        return RetokenizedText(self._target.tokenizer, self.loaded.tokenizer, goes_on)

    def model_signature(self) -> ModelSignature | None:
        return None

    def probs_of(
        self, rows: Rows, tokens: Tensor, wanted: Sequence[bool] | None = None
    ) -> Tensor | None:
        return None

    def observe(self, round: Round) -> None:
        """Leaves it to the next round to compare what is cached with the text."""
        self.runner.drop_checkpoints(UNSETTLED)

    def _draft_counts(self, rows: Rows, budgets: Sequence[int]) -> list[int]:
        """How many tokens each row drafts; their texts are translated."""
        return [
            min(budget, self._reserve) if budget and self._translate(rows, number) else 0
            for number, budget in enumerate(budgets)
        ]

    def _translate(self, rows: Rows, number: int) -> bool:
        """Finds a row's text in the drafter's tokens, and how much of it is cached; returns whether
        a draft can follow."""
        row = self._rows[number]
        ids = row.text.extend(rows.since(number, row.text.read))
        if row.text.unfinished or not ids:
            return False
        prompt = row.prompt
        self._make_room(number, len(ids))
        if row.prompt is not prompt:
            ids = row.text.extend([])
        own, lengths = ids[row.begin :], self.runner.lengths
        borrowed = self._borrow(number, own)
        if borrowed:
            row.cached = own[:borrowed]
        same = common_prefix_len(row.cached[: lengths[number]], own)
        lengths[number] = self.runner.restorable_length(number, min(same, len(own) - 1))
        row.own = own
        return True

    def _unread(self, number: int) -> list[int]:
        return self._rows[number].own[self.runner.lengths[number] :]

    def _note_cached(self, live: Sequence[bool], fed: Tensor) -> None:
        """Remembers what the slots hold after drafts ``fed`` [B, T], in own tokens."""
        for row, on, tokens in zip(self._rows, live, fed.tolist(), strict=False):
            if on:
                row.cached = [*row.own, *tokens]


def cross_tokenizer_drafter(
    wanted: str, target: LoadedModel, drafter: LoadedModel, runner: Runner, images: ImageAccess
) -> CrossTokenizerModel:
    """Returns the drafter that ``vocabulary`` asks for; with "auto" the intersection of both
    vocabularies if it covers `ENOUGH`, else texts.

    Raises ``VocabularyMismatch`` where a tokenizer is missing, or nothing is shared.
    """
    from outpace.methods.models.intersection import IntersectionModel
    from outpace.methods.models.text import StringMatchModel

    if target.tokenizer is None or drafter.tokenizer is None:
        missing = "target" if target.tokenizer is None else "drafter"
        raise VocabularyMismatch(
            f"drafting with another tokenizer needs both, and the {missing} has none: give it as "
            "'tokenizer', or use a drafter with the target's vocabulary."
        )
    shared = shared_tokens(target, drafter, runner.device)
    enough = len(shared) > 0 and (wanted == INTERSECTION or coverage(target, shared) >= ENOUGH)
    if wanted in (AUTO, INTERSECTION) and enough:
        return IntersectionModel(target, drafter, runner, images, shared)
    if wanted == INTERSECTION:
        raise VocabularyMismatch(
            "drafter and target have no token in common: use vocabulary 'text', or another drafter."
        )
    return StringMatchModel(target, drafter, runner, images)
