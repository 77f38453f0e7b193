"""Parts of a round: its watch, the tokens that its texts get, what is counted, and the hidden
states that go to the drafter."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from outpace.core.faults import RowFault
from outpace.core.request import Request
from outpace.core.stats import Seconds
from outpace.core.transfer import padded
from outpace.draft.base import Drafter
from outpace.draft.round import Outcome, Round
from outpace.engine.request import EngineRequest, Logprob
from outpace.targets.base import HiddenStates, PrefillChunk, Scores


class Stopwatch:
    """Times drafting, scoring and the rest of one round; it is running once it is made.

    A GPU is handed work and computes it later. There the device itself notes when it has come to
    the end of a part, so that nobody has to wait for it before the round's only transfer.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin = perf_counter()
        self._marks = [self._now()]

    def lap(self) -> None:
        """Ends drafting, or scoring."""
        self._marks.append(self._now())

    def stop(self) -> Seconds:
        """Returns the seconds of the parts, when the host has seen what was scored."""
        total = perf_counter() - self._begin
        draft, score = (self._between(*each) for each in itertools.pairwise(self._marks))
        return Seconds(draft, score, total - draft - score)

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _between(self, begin: Any, end: Any) -> float:
        if self._device.type != "cuda":
            return float(end - begin)
        return float(begin.elapsed_time(end)) / 1e3


def emit(
    requests: Sequence[EngineRequest],
    outcomes: Sequence[Outcome],
    reported: Sequence[list[dict[int, Logprob]]],
    dead_ends: Mapping[int, Mapping[int, RowFault]],
) -> None:
    """Appends to each text, and notes how much it took, up to the token that ends it.

    After a node that left no token to go on with, nothing is the target's.
    """
    for row, (request, outcome) in enumerate(zip(requests, outcomes, strict=True)):
        dead, end = dead_ends.get(row), None
        if dead:
            end = next((at for at, node in enumerate(outcome.path, 1) if node in dead), None)
        outcome.emitted = request.extend(outcome.tokens[:end], reported[row])
        outcome.accepted = min(outcome.emitted, len(outcome.path))
        if dead and end is not None and not request.finished:
            request.fail(dead[outcome.path[end - 1]])


def update_metrics(requests: Sequence[EngineRequest], round: Round) -> None:
    """Adds a round to the metrics of its requests."""
    seconds = round.seconds
    for request, outcome in zip(requests, round.outcomes, strict=True):
        metrics = request.metrics
        metrics.count_round(outcome.drafted, outcome.accepted, outcome.emitted)
        ended = outcome.emitted <= len(outcome.path)
        metrics.count_positions(outcome.depth, outcome.accepted, ended)
        if outcome.predicted:
            metrics.count_prediction(outcome.drafted, outcome.accepted)
        metrics.draft_seconds += seconds.draft
        metrics.verify_seconds += seconds.score
        metrics.sample_seconds += seconds.rest
        metrics.total_seconds += seconds.total


def deliver_prompt_states(
    drafter: Drafter, requests: Sequence[Request], part: PrefillChunk
) -> None:
    """Gives a drafter what it needs of a part of the prompts. requests: by row."""
    if drafter.needs.hidden_layers:
        read = [requests[row] for row in part.rows]
        drafter.read(read, part.tokens, _side_by_side(part.hidden_states, drafter))


def deliver_round_states(
    drafter: Drafter,
    requests: Sequence[Request],
    scores: Scores,
    pending: Sequence[Sequence[int]],
    outcomes: Sequence[Outcome],
) -> None:
    """Gives a drafter what it needs of a round: each row's tokens that were pending and the path
    that was accepted after them. So it gets the hidden states of every committed token, once."""
    if not drafter.needs.hidden_layers:
        return
    root = len(pending[0]) - 1
    states = _side_by_side(scores.hidden_states, drafter)  # [B, P + N, H]
    columns = [[*range(root + 1), *(root + node for node in one.path)] for one in outcomes]
    longest = max(map(len, columns))
    if longest > root + 1:
        index = padded(columns, states.device)[..., None].expand(-1, -1, states.shape[-1])
        states = states.gather(1, index)
    tokens = [[*before, *one.tokens[:-1]] for before, one in zip(pending, outcomes, strict=True)]
    drafter.read(requests, tokens, states[:, :longest])


def _side_by_side(states: HiddenStates, drafter: Drafter) -> Tensor:
    return torch.cat([states[layer] for layer in drafter.needs.hidden_layers], -1)
