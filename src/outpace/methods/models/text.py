"""Drafts text, whatever tokens the two models cut it into (UAG, universal assisted generation).

Timor et al. 2025 (arXiv 2502.05202), algorithm 2 (string-level exact match).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from outpace.core.proposal import Capabilities, DraftSampling, Proposal
from outpace.draft.base import Rows
from outpace.draft.chains import deterministic_chains
from outpace.draft.vocab_mapping import VocabMapping
from outpace.methods.models.cross_tokenizer import CrossTokenizerModel
from outpace.methods.models.images import ImageAccess
from outpace.methods.models.spelling import special_ids
from outpace.methods.models.translation import continuation, spoken
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.runner import Runner

CONTEXT = 8
"""Tokens before the draft that are decoded with it: what one says may depend on those before it."""


class StringMatchModel(CrossTokenizerModel):
    """Continues the text greedily in its own tokens; what it says is cut into the target's.

    The distribution of such tokens is unknown. They are fixed, not drawn.
    """

    # There are no distributions to end chains by.
    capabilities: Capabilities = replace(
        CrossTokenizerModel.capabilities, supports_early_stop=False
    )

    def __init__(
        self, target: LoadedModel, drafter: LoadedModel, runner: Runner, images: ImageAccess
    ) -> None:
        super().__init__(target, drafter, runner, images)
        self.sampling_kinds = frozenset({DraftSampling.DETERMINISTIC})
        own = drafter.vocabulary
        self._vocab_mapping = VocabMapping.shared(own, own, runner.device)
        self._special = special_ids(target.tokenizer)

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        counts = self._draft_counts(rows, budgets)
        if not any(counts):
            return Proposal.empty(len(rows), rows.seeds.device)
        live = [count > 0 for count in counts]
        drafted = self._catch_up(live).argmax(-1, keepdim=True)  # [B, T]
        while drafted.shape[1] < max(counts):
            logits, _ = self._score(drafted[:, -1:], keep=1)
            self.runner.advance([int(row) for row in live])
            drafted = torch.cat([drafted, logits[:, -1].argmax(-1, keepdim=True)], 1)
        self._note_cached(live, drafted[:, :-1])
        own = zip(drafted.tolist(), counts, strict=True)
        drafts = [
            self._in_targets(row, tokens[:count])[:count] if count else []
            for row, (tokens, count) in enumerate(own)
        ]
        return deterministic_chains(drafts, rows.seeds.device)

    def _in_targets(self, row: int, own: list[int]) -> list[int]:
        """The target's tokens for what the drafter says, up to the first that is not text."""
        assert self.loaded is not None
        ends = [at for at, token in enumerate(own) if token in self.loaded.eos_ids]
        said = own[: ends[0]] if ends else own
        text = spoken(self.loaded.tokenizer, self._rows[row].own[-CONTEXT:], said)
        tokens = continuation(self._target.tokenizer, text)
        odd = [
            at
            for at, token in enumerate(tokens)
            if token in self._special or token >= self._target.vocabulary
        ]
        if odd:
            return tokens[: odd[0]]
        return [*tokens, *self._target.eos_ids[:1]] if ends else tokens
