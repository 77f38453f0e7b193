"""What drafters that are a part of the target have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from outpace.core.proposal import Drawn, Proposal
from outpace.core.transfer import to_device
from outpace.core.trees.tree import Tree
from outpace.core.values import shown
from outpace.draft.base import Drafter, Round, RowInfo, Rows
from outpace.draft.chains import Chains
from outpace.draft.itself.exits import ExitThreshold, ended
from outpace.draft.remembered import Remembered
from outpace.errors import ConfigError
from outpace.targets.base import Target, View

UNREAD = 16
"""Tokens of the longest prompt that a part of the target reads by itself in the first round."""


class PartialDrafter(Drafter):
    """Draws a chain from a part of the target, over the target's own weights and slots.

    What the part writes lies behind what is committed, where the target's next pass writes before
    it reads. So nothing of it is ever seen, and nothing has to be rolled back.
    """

    draws: frozenset[Drawn] = frozenset({Drawn.IID})
    ends_chains: bool = True
    keeps_up: bool = True
    reads_prompts: ClassVar[bool]
    """Whether long prompts may be read by the part: the target then need not read them as far."""

    def __init__(self, target: Target, view: View, first: ExitThreshold | None) -> None:
        """first: how chains of a new text end early; None: they do not."""
        self.target, self.view = target, view
        self.pass_bytes = view.pass_bytes
        self._exits = None if first is None else Remembered(lambda: replace(first))
        self._drafted: list[int] = []  # by row, in the present round
        self._trees: dict[tuple[int, int], Tree] = {}

    def admit(self, rows: Sequence[RowInfo]) -> None:
        if self._exits is not None:
            self._exits.admit(rows)

    def retain(self, rows: Sequence[int]) -> None:
        if self._exits is not None:
            self._exits.retain(rows)

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        counts = [budget if self._begins(rows, row) else 0 for row, budget in enumerate(budgets)]
        if not any(counts):
            self._drafted = counts
            return Proposal.empty(len(rows), rows.seeds.device)
        lengths = self.target.lengths
        pending = [rows.since(row, lengths[row]) for row in range(len(rows))]
        self.view.begin()
        logits = self.view.forward(to_device(pending, rows.seeds.device), keep=1)[:, -1]  # [B, V]
        chains = Chains(rows, counts, self.lane)
        while chains.grow(logits) and self._goes_on(chains, logits):
            logits = self.view.forward(chains.tokens[:, -1:])[:, -1]
        self._drafted = chains.counts
        return chains.proposal(self._tree(len(rows), chains.length))

    def observe(self, rows: Rows, round: Round) -> None:
        drafts, self._drafted = self._drafted, []  # none where it was not asked
        if self._exits is not None and round.proposal.tree.size:
            for row, drafted in enumerate(drafts):
                self._exits[row].learn(drafted, min(drafted, round.verdict.nodes[row]))

    def rewind(self, rows: Rows) -> None:
        self._drafted = []

    def reset(self) -> None:
        super().reset()
        self._drafted = []

    def _begins(self, rows: Rows, row: int) -> bool:
        """Whether a row drafts yet. A long prompt is not read for the first draft alone, in any
        batch: what a row drafts must not depend on the others."""
        prompt, output = rows.history.prompts[row], rows.history.outputs[row]
        return self.reads_prompts or len(output) > 0 or len(prompt) <= UNREAD

    def _goes_on(self, chains: Chains, logits: Tensor) -> bool:
        """Ends the chains whose last token, drawn at ``logits`` [B, V], is not a sure one; returns
        whether any is left."""
        if self._exits is None:
            return True
        last = chains.tokens[:, -1:]
        sure = torch.softmax(logits.float(), -1).gather(1, last)[:, 0].tolist()
        exits = [self._exits[row] for row in range(len(sure))]
        chains.counts = ended(exits, chains.counts, chains.length, sure)
        return chains.length < max(chains.counts)

    def _tree(self, rows: int, nodes: int) -> Tree:
        if (rows, nodes) not in self._trees:
            self._trees[rows, nodes] = Tree.chain(rows, nodes, self.target.device)
        return self._trees[rows, nodes]


def first_exit(given: Any) -> ExitThreshold | None:
    """Returns what ``draft_exit`` asks for; ``ConfigError`` for anything but "adaptive", a
    probability or None."""
    if given is None:
        return None
    if given == "adaptive":
        return ExitThreshold()
    if isinstance(given, (int, float)) and not isinstance(given, bool) and 0 <= given < 1:
        return ExitThreshold(float(given), adaptive=False)
    raise ConfigError(
        f"draft_exit must be 'adaptive', a probability from 0 up to 1, or null, not {shown(given)}."
    )
