"""What an observer of an engine is shown of each round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from outpace.core.faults import RowFault
from outpace.core.proposal import Proposal
from outpace.core.stats import Seconds
from outpace.draft.base import Rows
from outpace.engine.request import Request
from outpace.engine.verifier import Decision
from outpace.verify.base import Rule


@dataclass(frozen=True, eq=False)
class RoundTrace:
    """One finished round. Nothing in it may be changed."""

    requests: Sequence[Request]
    """The requests of the rows, as the round left them."""
    rows: Rows
    """The batch as it was when the round began."""
    budgets: Sequence[int]
    """How many nodes each row was allowed to draft."""
    proposal: Proposal
    methods: Sequence[str]
    """By row, the name of the drafter that made the draft: the child's, where one drafter stands
    for several."""
    decisions: Sequence[Decision]
    emitted: Sequence[int]
    """How many tokens each text took before a stop condition."""
    rule: Rule
    """The rule with the evidence of the round."""
    probs: Tensor | None
    """``[B, M, V]``: the distributions that entered the rule; None where it was not asked
    (`Judgement.probs`)."""
    dead_ends: Mapping[int, Mapping[int, RowFault]]
    """By row, the drafted nodes that have no distribution, each with the reason
    (`LogitsPipeline.dead_ends`)."""
    seconds: Seconds


Observer = Callable[[RoundTrace], None]
