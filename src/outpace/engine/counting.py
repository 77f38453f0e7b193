"""What came of a round: the tokens that each of its requests gets, and what is counted for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outpace.core.faults import RowFault
from outpace.core.stats import Seconds
from outpace.engine.request import Logprob, Request
from outpace.engine.verifier import Decision
from outpace.policy.base import Outcome


def emit(
    played: Sequence[Request],
    decisions: Sequence[Decision],
    reported: Sequence[list[dict[int, Logprob]]],
    dead_ends: Mapping[int, Mapping[int, RowFault]],
) -> list[int]:
    """Appends to each text; returns how many tokens each took before a stop condition.

    After a node that left no token to go on with, nothing is the target's.
    """
    emitted = []
    for row, (request, decision) in enumerate(zip(played, decisions, strict=True)):
        dead = dead_ends.get(row, {})
        end = next((at for at, node in enumerate(decision.path, 1) if node in dead), None)
        taken = request.extend(decision.tokens[:end], reported[row])
        if end is not None and not request.finished:
            request.fail(dead[decision.path[end - 1]])
        emitted.append(taken)
    return emitted


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
