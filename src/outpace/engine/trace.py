"""What an observer of an engine is shown of each round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

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
    proposal: Proposal
    decisions: Sequence[Decision]
    emitted: Sequence[int]
    """How many tokens each text took before a stop condition."""
    rule: Rule
    """The rule with the evidence of the round."""
    laws: Tensor | None
    """``[B, M, V]``: the laws that entered the rule; None where it was not asked
    (`Judgement.laws`)."""
    seconds: Seconds


Observer = Callable[[RoundTrace], None]
