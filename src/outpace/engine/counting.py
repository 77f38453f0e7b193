"""What came of a round, counted for each of its requests."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.core.stats import Seconds
from outpace.engine.request import Request
from outpace.engine.verifier import Decision
from outpace.policy.base import Outcome


def counted(
    played: Sequence[Request],
    decisions: Sequence[Decision],
    emitted: Sequence[int],
    seconds: Seconds,
    methods: Sequence[str],
) -> list[Outcome]:
    """Adds the round to the metrics of each request; returns what came of it."""
    outcomes = []
    rows = zip(played, decisions, emitted, methods, strict=True)
    for request, decision, taken, method in rows:
        kept = min(taken, len(decision.path))
        metrics = request.metrics
        metrics.count_round(decision.drafted, kept, taken)
        metrics.count_positions(decision.depth, kept)
        metrics.draft_seconds += seconds.draft
        metrics.verify_seconds += seconds.score
        metrics.sample_seconds += seconds.rest
        metrics.total_seconds += seconds.total
        path = tuple(decision.path[:kept])
        outcomes.append(Outcome(decision.drafted, decision.depth, kept, taken, path, method))
    return outcomes
