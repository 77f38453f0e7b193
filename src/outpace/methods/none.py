"""No drafter: plain decoding, the baseline that everything is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from outpace.core.proposal import DraftSampling, Proposal
from outpace.draft.base import Drafter, Rows, Setup


class NoDrafter(Drafter):
    """Proposes nothing: each round is one target pass and one token."""

    name: ClassVar[str] = "none"
    sampling_kinds: frozenset[DraftSampling] = frozenset({DraftSampling.DETERMINISTIC})
    max_draft_tokens: int = 0

    @classmethod
    def build(cls, setup: Setup) -> NoDrafter:
        return cls()

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        return Proposal.empty(len(rows), rows.seeds.device)
