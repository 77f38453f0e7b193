"""The engine: admits requests into a ragged batch and runs rounds until they are finished."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter, sleep
from typing import TypeVar

import torch

from outpace.core.logits_pipeline import RowFault, static_bias
from outpace.core.proposal import Proposal
from outpace.draft.base import Drafter
from outpace.draft.round import Round, Rows
from outpace.engine.batch import Batch
from outpace.engine.request import EngineRequest
from outpace.engine.round_parts import Stopwatch, deliver_round_states, emit, update_metrics
from outpace.engine.scheduler import RequestQueue, TokenLimit
from outpace.engine.scheduling_policies import SchedulingPolicy
from outpace.engine.verifier import Verifier, logprobs_of, to_host
from outpace.errors import ConfigError
from outpace.policy.base import Controller, cap_budgets, check_requested_budget
from outpace.targets.base import ScoreInputs, Scores, Target

Done = TypeVar("Done")
Observer = Callable[[Round], None]

TOKENS_BETWEEN_ROUNDS = 2048
"""Prompt tokens that are read between two rounds, by default."""

HANDOVER = 0.01
"""Seconds for which a thread that comes back lets those that wait go first, at most."""


class Engine:
    """Decodes requests with one target, one drafter and one rule.

    A round, for all rows at once: the drafter proposes, the target scores the last committed token
    and the draft in one pass, the rule decides, the accepted tokens and one more are committed.
    With an empty proposal a round is plain decoding. Prompts are read between rounds, about
    ``max_batched_tokens`` at a time, so that a long one does not hold up the rows that write.

    Several threads may call `step`: one at a time runs a round for all of them. Whatever stops a
    step half way (an interruption, memory that runs out) costs no text: the next step admits the
    unfinished requests anew and reads what they had.

    ``observers`` are shown every `Round`.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        verifier: Verifier,
        controller: Controller,
        vocabulary: int,
        max_batched_tokens: int = TOKENS_BETWEEN_ROUNDS,
        scheduling_policy: SchedulingPolicy | None = None,
        max_tokens_held: int | None = None,
    ) -> None:
        """scheduling_policy: says which waiting request joins the batch next; unset: as they come.
        max_tokens_held: by all rows together; before there are more, the row that comes last is
        preempted."""
        verifier.check(drafter)
        queue, limit = RequestQueue(scheduling_policy), TokenLimit(max_tokens_held)
        self.batch = Batch(target, drafter, queue, limit, vocabulary)
        self.verifier = verifier
        self.observers: list[Observer] = []
        self.controller = controller
        self.max_batched_tokens = max_batched_tokens
        self._layers = verifier.hidden_layers | frozenset(drafter.needs.hidden_layers)
        self._turn = threading.Lock()
        self._waiting_threads: set[int] = set()  # for their turn, or that have it
        self._interrupted = False
        self._leaving = False  # whether requests have ended that may still wait in the queue
        self._step_thread: int | None = None  # the thread that runs a step
        self._ids = itertools.count()

    @property
    def target(self) -> Target:
        return self.batch.target

    @property
    def drafter(self) -> Drafter:
        return self.batch.drafter

    @property
    def vocabulary(self) -> int:
        """Tokens that the target can generate."""
        return self.batch.vocabulary

    @property
    def waiting(self) -> RequestQueue:
        """The requests that wait for a row."""
        return self.batch.waiting

    @property
    def running(self) -> Sequence[EngineRequest]:
        """The request of each row."""
        return self.batch.running

    # -- requests ------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Queues a request; it joins the batch when a row is free.

        Raises ``ParamsError`` as `check` does.
        """
        self.check(request)
        rule, seeded = self.verifier.rule, request.params.seed is not None
        drafts_matter = bool(self.drafter.max_draft_tokens) and not self.verifier.coupled
        exact = request.params.greedy and (rule.lossless or rule.keeps_greedy)
        request.reports_seed = seeded or exact or not drafts_matter
        request.reproducible = seeded and not exact and not self.verifier.coupled
        request.id = next(self._ids)
        self.waiting.add(request)

    def check(self, request: EngineRequest) -> None:
        """Raises ``ParamsError`` for options that leave a request no token at all, or cannot be
        honoured."""
        check_requested_budget(request, self.target.max_nodes)
        static_bias([request.options], self.vocabulary)  # refuses tokens outside the vocabulary

    def remove(self, *requests: EngineRequest) -> None:
        """Ends requests where they are. Their rows are free again now or, where another thread is
        running a round, after that round."""
        self._leaving = True
        for request in requests:
            if request.finished and request.metrics.account is not None:
                continue
            # First: once it has ended, the thread that runs a round may clear its state.
            account = self.controller.account(request)
            if request.abort() or request.metrics.account is None:
                request.metrics.account = account
        if self._turn.acquire(blocking=False):
            try:
                if not self._interrupted:
                    with torch.inference_mode():
                        self._run_or_start_over(self._release)
            finally:
                self._turn.release()

    def run_between_rounds(self, work: Callable[[], Done]) -> Done:
        """Returns what ``work`` does while nobody runs a round."""
        self._refuse_itself()
        with self._queueing(), self._turn:
            self._step_thread = threading.get_ident()
            try:
                return work()
            finally:
                self._step_thread = None

    @contextmanager
    def _queueing(self) -> Iterator[None]:
        """Lets threads that wait for their turn have it first. A thread that gives its turn back
        and wants another one would otherwise take it before they have woken up."""
        give_up = perf_counter() + HANDOVER
        while self._waiting_threads and not self._turn.locked() and perf_counter() < give_up:
            sleep(HANDOVER / 200)
        me = threading.get_ident()
        try:
            self._waiting_threads.add(me)
            yield
        finally:
            self._waiting_threads.discard(me)

    def flush(self) -> None:
        """Is called where a caller waits for no text any more: writes what was learned on the way.
        Where another one still does, nothing is written yet: it will call this, too."""
        if not self._turn.acquire(blocking=False):
            return
        try:
            if all(request.finished for request in self.running):
                for file in self.drafter.files():
                    file.flush()
        finally:
            self._turn.release()

    @contextmanager
    def observing(self, observer: Observer) -> Iterator[None]:
        """Shows an observer the rounds that are run inside."""
        self.observers.append(observer)
        try:
            yield
        finally:
            self.observers.remove(observer)

    @contextmanager
    def override_parts(
        self,
        drafter: Drafter | None = None,
        verifier: Verifier | None = None,
        controller: Controller | None = None,
    ) -> Iterator[None]:
        """Runs the rounds inside with other parts than the engine's own, while nobody else uses
        it. drafter: one that the engine's own stands for."""
        own = self.drafter, self.verifier, self.controller
        self.batch.drafter, self.verifier = drafter or self.drafter, verifier or self.verifier
        self.controller = controller or self.controller
        try:
            yield
        finally:
            self.batch.drafter, self.verifier, self.controller = own

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether any request is not finished."""
        # Those that wait are looked at last: they may be many.
        return not all(one.finished for one in self.running) or not all(
            one.finished for one in self.waiting
        )

    def num_computed_tokens(self, request: EngineRequest) -> int:
        """Returns how many of a request's tokens are cached: as long as its prompt is being read,
        how far that is; 0 for a request that waits or has ended."""
        # Another thread may be adding or taking out a row: there may be one more of either.
        pairs = zip(self.running, self.target.lengths, strict=False)
        return next((length for one, length in pairs if one is request), 0)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of weights and caches."""
        own = self.drafter.weight_bytes
        return {
            "target_weights": self.target.weight_bytes,
            "target_cache": self.target.cache_bytes,
            "drafter_weights": own,
            "drafter_cache": self.drafter.nbytes - own,
        }

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling or recording passes so far."""
        return self.target.compile_seconds + self.drafter.compile_seconds

    # -- steps ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[EngineRequest]:
        """Admits what fits, reads prompts, runs one round, and returns the requests that took part
        in it.

        A request that cannot go on, because its options contradict each other or code of its own
        fails, ends with its error, and the others go on.
        """
        self._refuse_itself()
        with self._queueing(), self._turn, self.target.step_context():
            return self._run_or_start_over(self._step)

    def _refuse_itself(self) -> None:
        """Raises ``ConfigError`` where the thread that runs a step asks for another one."""
        if self._step_thread == threading.get_ident():
            raise ConfigError(
                "a logits processor, stop condition or observer called the engine that is calling "
                "it: generate with another LLM there."
            )

    def _run_or_start_over(self, work: Callable[[], Done]) -> Done:
        """Returns what ``work`` does. If it is left before its end, that is remembered, and the
        next work begins by starting over."""
        self._step_thread = threading.get_ident()
        try:
            if self._interrupted:
                for request in self.running:
                    request.finish_extend()
                self._account_for_ended()
                self.batch.start_over()
            self._interrupted = True
            done = work()
            self._interrupted = False
            return done
        finally:
            self._step_thread = None

    def _step(self) -> list[EngineRequest]:
        batch = self.batch
        self._release()
        batch.preempt()
        batch.admit(self.controller)
        batch.prefill(self.max_batched_tokens, self._layers)
        scheduled = batch.running[: batch.target.num_ready_rows]
        if scheduled:
            try:
                self._round(scheduled)
            except RowFault as error:  # the request that stands in its way ends
                scheduled[error.row].fail(error)
            batch.waiting.policy.on_round_end(scheduled)
            batch.fork_finished_rows(self.controller)
            self._release()
        return scheduled

    def _release(self) -> None:
        if self._leaving:
            self._leaving = False
            self.waiting.drop_finished()
        self._account_for_ended()
        self.batch.retain([request for request in self.running if not request.finished])

    def _account_for_ended(self) -> None:
        """Gives texts that ended by a fault or an interruption their account."""
        for request in self.running:
            if request.finished and request.metrics.account is None:
                request.metrics.account = self.controller.account(request)

    # -- the round -----------------------------------------------------------------------------

    def _round(self, scheduled: Sequence[EngineRequest]) -> None:
        """Plans, proposes, scores, verifies and commits, and shows everybody what came of it."""
        compiled = self.compile_seconds
        plan = self.controller.plan(scheduled, self.verifier.terms)
        most = cap_budgets(scheduled, plan.budgets, self.target.max_nodes)
        self.batch.token_limit.note_drafts(most)
        rows = self.batch.rows(scheduled, plan)

        watch = Stopwatch(self.target.device)
        rows, budgets, proposal = self._propose(rows, most)
        watch.lap()
        scores, pending = self._score(rows, proposal)
        watch.lap()

        verdict = self.verifier(scores, proposal, rows)
        unread = rows.pipeline.unread_dead_ends
        verdict, outcomes, look = to_host(verdict, proposal, self.drafter.name, unread)
        dead_ends = rows.pipeline.dead_ends if look else {}
        reported = logprobs_of(scores.logits, proposal, rows, scheduled, outcomes)
        softmax_probs = None
        if self.drafter.needs.softmax_probs:
            softmax_probs = rows.pipeline.softmax_probs(
                scores.logits, proposal.branches, rows.history
            )

        # A path may go on after a token that ends its text: that row leaves the batch then.
        self.target.commit([outcome.path for outcome in outcomes])
        emit(scheduled, outcomes, reported, dead_ends)
        round = Round(
            rows,
            budgets,
            proposal,
            verdict,
            outcomes,
            watch.stop(),
            softmax_probs=softmax_probs,
            aux_logits=scores.aux_logits,
            dead_ends=dead_ends,
        )
        self._observe(round, scheduled, scores, pending, self.compile_seconds == compiled)

    def _observe(
        self,
        round: Round,
        scheduled: Sequence[EngineRequest],
        scores: Scores,
        pending: Sequence[Sequence[int]],
        steady: bool,
    ) -> None:
        """Shows everybody a round. pending: each row's committed tokens that were not cached before
        it. steady: nothing was compiled in it; compiling is no part of what a round costs."""
        update_metrics(scheduled, round)
        # Before the drafter, which may take a pass to learn from it, and be interrupted in that.
        self.controller.record(scheduled, round.outcomes, round.seconds if steady else None)
        for request in scheduled:
            if request.finished:
                request.metrics.account = self.controller.account(request)
        fault = None
        try:
            deliver_round_states(self.drafter, scheduled, scores, pending, round.outcomes)
            with round.rows.pipeline.drafting():
                self.drafter.observe(round)
        except RowFault as error:
            # The distributions of a row cannot be made for the drafter: its text ends with that
            # error, after the tokens of the round, which stay the target's.
            fault = error
            scheduled[error.row].fail(error)
        for observer in self.observers:
            observer(round)
        if fault is not None:
            ended = scheduled[fault.row]
            ended.metrics.account = self.controller.account(ended)
            self.batch.start_over()

    def _propose(self, rows: Rows, budgets: Sequence[int]) -> tuple[Rows, Sequence[int], Proposal]:
        """Returns the rows, with the drafter that was picked for each, how many nodes each may
        draft, and what is drafted."""
        if not any(budgets):
            return rows, budgets, self.batch.empty_proposal(len(rows))
        with rows.pipeline.drafting():
            if self.drafter.candidate_drafters:
                found = self.drafter.look_up(rows, budgets)
                picks = self.controller.pick(rows.requests, found, budgets)
                rows = replace(rows, picks=picks)  # with the same `Rows.state`
                budgets = [pick.budget for pick in picks] or budgets
            return (
                rows,
                budgets,
                self.drafter.propose(rows, budgets).cut_to_vocabulary_(self.vocabulary),
            )

    def _score(self, rows: Rows, proposal: Proposal) -> tuple[Scores, list[list[int]]]:
        """Returns the scores, and each row's committed tokens that were not cached before."""
        lengths = self.target.lengths
        pending = [rows.since(row, lengths[row]) for row in range(len(rows))]
        aux_tokens = self.verifier.aux_tokens(proposal)
        inputs = ScoreInputs(
            pending, proposal.tokens, proposal.tree, aux_tokens, self._layers, proposal.precomputed
        )
        return self.target.score(inputs), pending
