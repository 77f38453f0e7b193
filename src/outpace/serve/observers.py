"""Observers of the engine's rounds: counters and histograms for Prometheus, under vLLM's names with
our own prefix, and how each token came about, which the playground draws."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from outpace.core.request import Request
from outpace.draft.round import Outcome, Round
from outpace.serve.engine_thread import Job

log = logging.getLogger("outpace.serve")

# -- counters and histograms -----------------------------------------------------------------------

LATENCIES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
GAPS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)
LENGTHS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


class ServerMetrics:
    """The figures of ``/metrics``. Called in the engine's thread.

    outpace:spec_decode_num_accepted_tokens_total / ..._num_draft_tokens_total is the acceptance
    rate; 1 + accepted / drafts is vLLM's mean acceptance length.
    """

    def __init__(
        self, model: str, running: Callable[[], int], waiting: Callable[[], int], rows: int
    ) -> None:
        self._registry = CollectorRegistry()
        self._model = model
        self._gauge("num_requests_running", "Texts that have a row.", running)
        self._gauge("num_requests_waiting", "Texts that wait for a row.", waiting)
        self._gauge("num_rows", "Texts that can be decoded at once.", lambda: rows)
        self._prompt = self._counter("prompt_tokens", "Prompt tokens, those of each text.")
        self._cached = self._counter(
            "prefix_cache_hits",
            "Prompt tokens that were not read for a text: cached, or read for another of its "
            "request.",
        )
        self._generated = self._counter("generation_tokens", "Generated tokens.")
        self._ended = self._counters("request_success", "Texts by their end.", "finished_reason")
        self._preemptions = self._counter("num_preemptions", "Texts that were preempted.")
        self._drafts = self._counter("spec_decode_num_drafts", "Drafts.")
        self._drafted = self._counter("spec_decode_num_draft_tokens", "Drafted tokens.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Accepted tokens.")
        self._by_depth = self._counters(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by depth.", "position"
        )
        self._depths: list[Counter] = []
        self._first = self._histogram(
            "time_to_first_token_seconds", "Seconds from arrival to the first token."
        )
        self._gap = self._histogram(
            "inter_token_latency_seconds",
            "Seconds per token after those that came first, on average over a call.",
            GAPS,
        )
        self._whole = self._histogram(
            "e2e_request_latency_seconds", "Seconds from arrival to the end."
        )
        self._queued = self._histogram(
            "request_queue_time_seconds", "Seconds from arrival to a row."
        )
        self._lengths = self._histogram("request_prompt_tokens", "Tokens of a prompt.", LENGTHS)
        self._outputs = self._histogram("request_generation_tokens", "Tokens of a text.", LENGTHS)

    def exposition(self) -> bytes:
        """Returns all values in Prometheus' text format."""
        return generate_latest(self._registry)

    def observe_round(self, round: Round) -> None:
        """Counts a round; an observer of the engine."""
        self._generated.inc(sum(one.emitted for one in round.outcomes))
        drafted = [one for one in round.outcomes if one.drafted]
        if not drafted:
            return
        self._drafts.inc(len(drafted))
        self._drafted.inc(sum(one.drafted for one in drafted))
        accepted = [one.accepted for one in drafted]
        self._accepted.inc(sum(accepted))
        for depth in range(max(accepted)):
            if depth == len(self._depths):  # found by its label once: that takes a lock
                self._depths.append(self._by_depth.labels(self._model, str(depth)))
            self._depths[depth].inc(sum(depth < count for count in accepted))

    def observe_job(self, job: Job) -> None:
        """Counts a job that has ended."""
        for request in job.requests:
            self._ended.labels(self._model, request.finish_reason or "abort").inc()
            self._preemptions.inc(request.preemptions)
            source = [] if request.source is None else request.source.token_ids
            length = len(request.prompt_ids) + len(source)
            if request.admitted_token_ids:  # others ended while they waited, and nobody read them
                self._prompt.inc(length)
                self._cached.inc(request.cached_tokens)
            self._lengths.observe(length)
            self._outputs.observe(len(request.output_ids))
        assert job.ended is not None  # it is set before anybody hears of it
        last = job.ended
        self._whole.observe(last - job.arrived)
        if job.began is not None:
            self._queued.observe(job.began - job.arrived)
        if job.first_token is None:
            return
        self._first.observe(job.first_token - job.arrived)
        longest = job.longest
        later = len(job.requests[longest].output_ids) - job.first_counts[longest]
        if later > 0:
            self._gap.observe((last - job.first_token) / later)

    def _gauge(self, name: str, text: str, value: Callable[[], int]) -> None:
        gauge = Gauge(f"outpace:{name}", text, ["model_name"], registry=self._registry)
        gauge.labels(self._model).set_function(value)

    def _counters(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"outpace:{name}", text, ["model_name", *labels], registry=self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return self._counters(name, text).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = LATENCIES) -> Histogram:
        return Histogram(
            f"outpace:{name}", text, ["model_name"], buckets=buckets, registry=self._registry
        ).labels(self._model)


# -- how each token came about ---------------------------------------------------------------------

Origin = Literal["accepted", "corrected", "bonus", "plain"]
"""A drafted token that was kept; the target's own in the place of a drafted one; the target's own
after a draft that was kept to its end; one of a round without a draft."""


def origins(outcome: Outcome, parents: Sequence[int]) -> list[Origin]:
    """Returns where each token that a round emits came from. parents: of the drafted nodes."""
    if not outcome.drafted:
        return ["plain"]
    last = outcome.path[-1] if outcome.path else 0
    extra: Origin = "corrected" if last in parents else "bonus"
    kept: list[Origin] = ["accepted"] * len(outcome.path)
    return [*kept, extra]


class Tracer:
    """An observer that writes down the rounds of the requests that ask for it."""

    def __init__(
        self, decode: Callable[[int], str], special: Collection[int] = frozenset()
    ) -> None:
        """special: tokens whose names are no text, such as the end of a turn."""
        self._decode, self._special = decode, special
        # Written by the engine's thread, emptied by another: a deque takes both without a lock.
        self._rounds: dict[int, deque[dict[str, Any]]] = {}

    def follow(self, requests: Sequence[Request]) -> None:
        """Begins to write down the rounds of these requests."""
        for request in requests:
            self._rounds[id(request)] = deque()

    def leave(self, requests: Sequence[Request]) -> None:
        """Forgets these requests."""
        for request in requests:
            self._rounds.pop(id(request), None)

    def take(self, request: Request) -> list[dict[str, Any]]:
        """Returns the rounds that were written down since the last time."""
        rounds = self._rounds.get(id(request), deque())
        return [rounds.popleft() for _ in range(len(rounds))]

    def __call__(self, played: Round) -> None:
        if not self._rounds:
            return
        for row, request in enumerate(played.requests):
            rounds = self._rounds.get(id(request))
            if rounds is not None:
                self._write(rounds, played, row)

    def _write(self, rounds: deque[dict[str, Any]], played: Round, row: int) -> None:
        """Adds a round of a row. Where a token cannot be decoded, its trace ends there, and no
        text."""
        try:
            rounds.append(self._round(played, row))
        except Exception:
            log.exception("a round could not be written down, and the trace of its text ends")
            self.leave([played.requests[row]])

    def _round(self, played: Round, row: int) -> dict[str, Any]:
        outcome = played.outcomes[row]
        drafted, taken = outcome.drafted, outcome.emitted
        tokens = played.proposal.tokens[row, :drafted].tolist()
        parents = played.proposal.tree.parents[row, :drafted].tolist()
        return {
            "nodes": [
                {**self._token(token), "parent": parent}
                for token, parent in zip(tokens, parents, strict=True)
            ],
            "path": outcome.path[:taken],
            "tokens": [
                {**self._token(token), "origin": origin}
                for token, origin in zip(
                    outcome.tokens[:taken], origins(outcome, parents), strict=False
                )
            ],
            "seconds": round(played.seconds.total, 6),
        }

    def _token(self, token: int) -> dict[str, Any]:
        return {"id": token, "text": self._decode(token), "special": token in self._special}
