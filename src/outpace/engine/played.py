"""A round that was played, on its way to the drafter."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outpace.core.faults import RowFault
from outpace.core.proposal import Verdict
from outpace.draft.base import Drafter, Round
from outpace.engine.states import deliver_round
from outpace.engine.trace import RoundTrace
from outpace.targets.base import Scores


@dataclass(frozen=True, eq=False)
class Played:
    """A round whose tokens the texts have."""

    trace: RoundTrace
    verdict: Verdict
    scores: Scores
    pending: list[list[int]]
    """Each row's committed tokens that were not cached before."""
    probs: Tensor | None
    """``[B, M, V]``, the target's before any argmax, if the drafter learns from them."""

    def tell(self, drafter: Drafter) -> bool:
        """Returns whether a drafter has taken in the round. A row whose distributions it cannot
        make ends with that error, after the tokens of the round, which stay the target's."""
        trace = self.trace
        news = Round(
            trace.proposal, self.verdict, trace.seconds, self.probs, self.scores.aux_logits
        )
        try:
            deliver_round(drafter, self.scores, self.pending, trace.decisions)
            with trace.rows.pipeline.drafting():
                drafter.observe(trace.rows, news)
        except RowFault as error:
            trace.requests[error.row].fail(error)
            return False
        return True
