"""The base class of self-speculative drafters that are a part of the target, and their options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Lt

from outpace.core.options import Options
from outpace.core.proposal import Capabilities, DraftSampling, Proposal, StoppingFn
from outpace.core.request import PerRequest
from outpace.core.transfer import to_device
from outpace.draft.base import Drafter, Round, Rows
from outpace.draft.chains import Chains
from outpace.draft.exits import FIRST, PAPER, ExitThreshold, ThresholdRule, below
from outpace.draft.trees import TreeLevelsCache
from outpace.targets.base import PartialView, Target

DraftExitOption = Annotated[Literal["adaptive"] | float | None, Ge(0), Lt(1)]


@dataclass(frozen=True, kw_only=True)
class PartialOptions(Options):
    """What a user may set of a drafter that is a part of the target."""

    draft_exit: DraftExitOption = None
    """Drafting stops after a token with a lower probability than this; 'adaptive': a threshold
    that follows what is accepted; null: only at the budget."""


@dataclass(frozen=True)
class ExitSetting:
    """How chains end early."""

    first: float
    """The threshold of a new text."""
    rule: ThresholdRule | None
    """How it follows what is accepted; None: it stays."""


class PartialDrafter(Drafter):
    """Draws a chain from a part of the target, over the target's own weights and slots.

    What the part writes lies after what is committed, where the target's next pass writes before
    it reads. So nothing of it is ever seen, and nothing has to be rolled back.
    """

    sampling_kinds: frozenset[DraftSampling] = frozenset({DraftSampling.IID})
    capabilities: Capabilities = Capabilities(supports_early_stop=True, needs_no_prefill=True)

    def __init__(self, target: Target, view: PartialView, ending: ExitSetting | None) -> None:
        """ending: how chains end early; None: they do not."""
        self.target, self.view = target, view
        self.pass_bytes = view.pass_bytes
        self._rule = ending.rule if ending is not None else None
        self._exits: PerRequest[ExitThreshold] | None = None
        if ending is not None:
            first = ExitThreshold(ending.first)
            self._exits = PerRequest(lambda request: first, lasting=True)
        self._tree_levels = TreeLevelsCache(target.device)

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        if not any(budgets):
            return Proposal.empty(len(rows), rows.seeds.device)
        lengths = self.target.lengths
        pending = [rows.since(row, lengths[row]) for row in range(len(rows))]
        self.view.begin()
        logits = self.view.forward(to_device(pending, rows.seeds.device), keep=1)[:, -1]  # [B, V]
        chains = Chains(rows, budgets, self.random_stream, self._make_stopping_fn(rows))
        while chains.grow(logits):
            logits = self.view.forward(chains.tokens[:, -1:])[:, -1]
        rows.state[self] = budgets, chains.counts  # what each row might draft, and what it did
        return chains.proposal(self._tree_levels.chain(len(rows), chains.length))

    def observe(self, round: Round) -> None:
        made = round.rows.state.get(self)
        if made is None or self._exits is None or self._rule is None:
            return
        for row, (asked, drafted) in enumerate(zip(*made, strict=True)):
            if drafted:
                accepted, request = min(drafted, round.verdict.nodes[row]), round.requests[row]
                exit = self._exits[request]
                self._exits[request] = exit.after(self._rule, drafted, accepted, drafted == asked)

    def _make_stopping_fn(self, rows: Rows) -> StoppingFn | None:
        """What ends the chains of this round, by the thresholds of their texts."""
        if self._exits is None:
            return None
        return below([self._exits[request].threshold for request in rows.requests])


def parse_draft_exit(draft_exit: float | str | None) -> ExitSetting | None:
    """Returns how chains end early, as an option says it."""
    if draft_exit is None:
        return None
    if isinstance(draft_exit, str):
        return ExitSetting(FIRST, PAPER)
    return ExitSetting(draft_exit, None)
