"""A draft model proposes the tree of its most probable continuations, another one in every row.

EAGLE-2 (Li et al. 2024, arXiv 2406.16858), with a draft model in the place of its head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from outpace.core.proposal import Capabilities, Drawn, Proposal
from outpace.draft.base import Rows
from outpace.draft.dynamic import NODES, Growth
from outpace.heads.classifiers import Origin
from outpace.methods.models.chain import DraftModel
from outpace.methods.models.sight import Sight
from outpace.targets.hf.loading.loaded import Loaded
from outpace.targets.hf.runner import Runner


class DynamicTree(DraftModel):
    """Drafts the nodes that the model finds most probable, wherever they stand: deep where it is
    sure and wide where it is not.

    It is what ``branching: "dynamic"`` makes of "draft_tree". Levels are drafted as long as some
    node of them is among the best.
    """

    name: ClassVar[str] = "draft_tree"
    draws: frozenset[Drawn] = frozenset({Drawn.DETERMINISTIC})
    trees: bool = True
    capabilities: Capabilities = replace(DraftModel.capabilities, ends_chains=False)
    longest: int = NODES

    def __init__(
        self,
        drafter: Loaded,
        runner: Runner,
        vocabulary: int,
        growth: Growth,
        sight: Sight,
    ) -> None:
        """vocabulary: tokens of the target. sight: what it sees of images."""
        super().__init__(drafter, runner, vocabulary, sight)
        # No draft is longer than what a window leaves free for it.
        self._growth = Growth(growth.top_k, min(growth.depth, self._reserve))

    def origin(self) -> Origin | None:
        return None

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        budgets = self._update(rows, budgets)
        if not any(budgets) or not self._growth.depth:
            return Proposal.empty(len(rows), rows.seeds.device)
        for row, budget in enumerate(budgets):
            if budget:
                self._make_room(row, len(self._rows[row].own))
        logits = self._catch_up([budget > 0 for budget in budgets])
        return self._growth(rows, logits, self._deeper, budgets)
