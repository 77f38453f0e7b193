"""Drafts the tokens that two vocabularies have in common (TLI, token-level intersection).

Timor et al. 2025 (arXiv 2502.05202), algorithm 4: the draft model's distribution is restricted to
the shared tokens and made to sum to 1. From then on it is ordinary speculative sampling with that
distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outpace.core.proposal import Proposal
from outpace.draft.base import Rows
from outpace.draft.chains import Chains
from outpace.draft.vocab_mapping import VocabMapping
from outpace.methods.models.cross_tokenizer import CrossTokenizerModel
from outpace.methods.models.images import ImageAccess
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.runner import Runner


class IntersectionModel(CrossTokenizerModel):
    """Draws each token from the model's distribution over the shared tokens, under the request's
    own options."""

    def __init__(
        self,
        target: LoadedModel,
        drafter: LoadedModel,
        runner: Runner,
        images: ImageAccess,
        shared: VocabMapping,
    ) -> None:
        super().__init__(target, drafter, runner, images)
        self._vocab_mapping = shared

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        counts = self._draft_counts(rows, budgets)
        if not any(counts):
            return Proposal.empty(len(rows), rows.seeds.device)
        live = [count > 0 for count in counts]
        logits = self._catch_up(live)  # [B, V]
        chains, fed = Chains(rows, counts, self.random_stream), [rows.seeds.new_empty(len(rows), 0)]
        while chains.grow(logits):
            # A token that is not shared is only drawn where the options leave none of the others.
            fed.append(self._vocab_mapping.to_draft(chains.tokens[:, -1:]).clamp(min=0))
            logits = self._score(fed[-1], keep=1)[0][:, -1]
            self.runner.advance([int(row) for row in live])
        self._note_cached(live, torch.cat(fed, 1))
        return chains.proposal(self._tree_levels.chain(len(rows), chains.length))
