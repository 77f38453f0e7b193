"""The engine: admits requests into a ragged batch and plays rounds until they are finished."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import TypeVar

import torch
from torch import Tensor

from outpace.core.logits_pipeline import History, LogitsPipeline, RowFault
from outpace.core.proposal import Proposal
from outpace.core.transfer import synchronise, to_device
from outpace.draft.base import Drafter, Round, Rows
from outpace.engine.orders import Order
from outpace.engine.request import Request
from outpace.engine.rounds import Stopwatch, count, deliver_part, deliver_round, emit
from outpace.engine.scheduler import Queue, Room
from outpace.engine.verifier import Verifier, branches_of, logprobs_of, on_host
from outpace.errors import ConfigError, PromptError, UnsupportedModel
from outpace.policy.base import Controller, RoundPlan, affordable, check_wish
from outpace.targets.base import Plan, PromptInputs, Scores, Target

Done = TypeVar("Done")
Observer = Callable[[Round], None]

TOKENS_BETWEEN_ROUNDS = 2048
"""Prompt tokens that are read between two rounds, by default."""


class Engine:
    """Decodes requests with one target, one drafter and one rule.

    A round, for all rows at once: the drafter proposes, the target scores the last committed token
    and the draft in one pass, the rule decides, the accepted tokens and one more are committed.
    With an empty proposal a round is plain decoding. Prompts are read between rounds, at most
    ``max_batched_tokens`` at a time, so that a long one does not hold up the rows that write.

    Several threads may call `step`: one at a time plays a round for all of them. Whatever stops a
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
        order: Order | None = None,
        max_tokens_held: int | None = None,
    ) -> None:
        """order: in which waiting requests join the batch; unset: as they come. max_tokens_held:
        by all rows together; before there are more, the last row in that order is put aside."""
        verifier.check(drafter)
        self.target = target
        self.drafter = drafter
        self.verifier = verifier
        self.vocabulary = vocabulary
        self.observers: list[Observer] = []
        self.waiting = Queue(order)
        self.running: list[Request] = []
        self.room = Room(max_tokens_held)
        self.controller = controller
        self.max_batched_tokens = max_batched_tokens
        self._layers = verifier.layers | frozenset(drafter.needs.states)
        self._turn = threading.Lock()
        self._interrupted = False
        self._leaving = False  # whether requests have ended that may still wait in the queue
        self._player: int | None = None  # the thread that is playing a step
        self._ids = itertools.count()
        self._pipeline: LogitsPipeline | None = None
        self._seeds: Tensor | None = None
        self._nothing: Proposal | None = None

    # -- requests ------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a request; it joins the batch when a row is free.

        Raises ``ParamsError`` for options that leave it no token at all, or cannot be honoured.
        """
        check_wish(request, self.target.most_nodes)
        LogitsPipeline([request.options], self.vocabulary)  # refuses tokens outside the vocabulary
        drafts_matter = bool(self.drafter.longest) and not self.verifier.coupled
        request.repeats = request.params.seeded or request.params.greedy or not drafts_matter
        request.reproducible = request.params.seeded and not self.verifier.coupled
        request.id = next(self._ids)
        self.waiting.add(request)

    def remove(self, *requests: Request) -> None:
        """Ends requests where they are. Their rows are free again now or, where another thread is
        playing a round, after that round."""
        for request in requests:
            if not request.finished:
                # First: once it has ended, the thread that plays a round may clear its state.
                account = self.controller.account(request)
                request.abort()
                request.metrics.account = account
        self._leaving = True
        if self._turn.acquire(blocking=False):
            try:
                if not self._interrupted:
                    with torch.inference_mode():
                        self._uninterrupted(self._release)
            finally:
                self._turn.release()

    def between_rounds(self, work: Callable[[], Done]) -> Done:
        """Returns what ``work`` does while nobody plays a round."""
        self._refuse_itself()
        with self._turn:
            self._player = threading.get_ident()
            try:
                return work()
            finally:
                self._player = None

    def settle(self) -> None:
        """Is called where a caller waits for no text any more: writes what was learned on the way.
        Where another one still does, nothing is written yet: it will call this, too."""
        if not self._turn.acquire(blocking=False):
            return
        try:
            if all(request.finished for request in self.running):
                for file in self.drafter.files():
                    file.settle()
        finally:
            self._turn.release()

    @contextmanager
    def observing(self, observer: Observer) -> Iterator[None]:
        """Shows an observer the rounds that are played inside."""
        self.observers.append(observer)
        try:
            yield
        finally:
            self.observers.remove(observer)

    @contextmanager
    def playing_with(
        self,
        drafter: Drafter | None = None,
        verifier: Verifier | None = None,
        controller: Controller | None = None,
    ) -> Iterator[None]:
        """Plays the rounds inside with other parts than the engine's own, while nobody else uses
        it. drafter: one that the engine's own stands for."""
        own = self.drafter, self.verifier, self.controller
        self.drafter, self.verifier = drafter or self.drafter, verifier or self.verifier
        self.controller = controller or self.controller
        try:
            yield
        finally:
            self.drafter, self.verifier, self.controller = own

    @property
    def busy(self) -> bool:
        """Whether any request is not finished."""
        # Those that wait are looked at last: they may be many.
        return not all(one.finished for one in self.running) or not all(
            one.finished for one in self.waiting
        )

    def tokens_read(self, request: Request) -> int:
        """Returns how many of a request's tokens are cached: as long as its prompt is being read,
        how far that is; 0 for a request that waits or has ended."""
        pairs = zip(self.running, self.target.lengths, strict=True)
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
    def step(self) -> list[Request]:
        """Admits what fits, reads prompts, plays one round, and returns the requests that took part
        in it.

        A request that cannot go on, because its options contradict each other or code of its own
        fails, ends with its error, and the others go on.
        """
        self._refuse_itself()
        with self._turn, self.target.computing():
            return self._uninterrupted(self._step)

    def _refuse_itself(self) -> None:
        """Raises ``ConfigError`` where the thread that plays a step asks for another one."""
        if self._player == threading.get_ident():
            raise ConfigError(
                "a logits processor, stop condition or observer called the engine that is calling "
                "it: generate with another LLM there."
            )

    def _uninterrupted(self, work: Callable[[], Done]) -> Done:
        """Returns what ``work`` does. If it is left before its end, that is remembered, and the
        next work begins by starting over."""
        self._player = threading.get_ident()
        try:
            if self._interrupted:
                self._start_over()
            self._interrupted = True
            done = work()
            self._interrupted = False
            return done
        finally:
            self._player = None

    def _step(self) -> list[Request]:
        self._release()
        self._make_room()
        self._admit()
        self._fill()
        played = self.running[: self.target.ready]
        if played:
            self._try_round(played)
            self.waiting.order.played(played)
            self._hand_over()
            self._release()
        return played

    def _start_over(self) -> None:
        """Puts all unfinished requests back in front of the queue: what target and drafter know of
        them may be anything."""
        for request in self.running:
            request.settle()
            request.recover()
        self.target.reset()
        self.drafter.end(self.running, interrupted=True)
        self._forget(self.running)
        self.waiting.put_back([row for row in self.running if not row.finished])
        self.running = []
        self.waiting.drop_finished()
        self._rows_changed()

    def _admit(self) -> None:
        while self.target.active < self.target.rows:
            request = self.waiting.first
            if request is None:
                return
            if request.finished:
                self.waiting.drop_finished()
                continue
            source = self._twin(request)
            if source is not None and not self._can_fork(source):
                return  # soon: its prompt is being read for both
            if not self.room.holds(self.running, request):
                return  # nobody overtakes it, so that it has its room soon
            if self._begins(request, source):
                self.waiting.join(request)

    def _hand_over(self) -> None:
        """Lets samples that wait join while the last row with their prompt is still there, if its
        own text has just ended: they fork from it, and the prompt is not read again."""
        first = self.waiting.first
        source = None if first is None else self._twin(first)
        if source is None or not self.running[source].finished:
            return
        ended = self.running[source]
        self._retain([one for one in self.running if one is ended or not one.finished])
        self._admit()

    def _twin(self, request: Request) -> int | None:
        """A row with the same prompt; one whose text has ended only if there is no other."""
        needs = self.drafter.needs.states
        if request.group is None or (needs and not self.drafter.copies_prompts):
            return None
        ids = request.token_ids
        twins = [
            row
            for row, other in enumerate(self.running)
            if other.group == request.group and other.began_with == ids
        ]
        return min(twins, key=lambda row: self.running[row].finished, default=None)

    def _can_fork(self, row: int) -> bool:
        read = self.target.lengths[row] >= len(self.running[row].began_with) - 1
        return read and self.target.ready == self.target.active

    def _begins(self, request: Request, source: int | None) -> bool:
        """Begins a request, or ends it where its prompt cannot be read; returns whether it has a
        row. After a failure that nobody foresees, such as memory that runs out, what target and
        drafter know of their rows may be anything: all other rows begin anew."""
        try:
            self._begin(request, source)
        except (PromptError, UnsupportedModel) as error:
            request.fail(error)
        except ConfigError:
            raise  # the whole engine cannot go on, as where its model has been changed
        except Exception as error:
            request.fail(error)
            self._start_over()
        return not request.finished

    def _begin(self, request: Request, source: int | None) -> None:
        again, request.began_with = bool(request.began_with), request.token_ids
        self.drafter.check(request)
        request.forked_from = None if source is None else self.running[source]
        if source is None:
            reuse = self.target.reuses and request.keep_cached
            most = self.drafter.takes_over(request) if reuse else 0
            inputs = PromptInputs(request.began_with, most, request.source, request.media)
            row = self.target.admit(inputs)
            request.taken_over = self.target.lengths[row]
        else:
            row, request.taken_over = self.target.fork(source), 0
        if not again:
            request.cached_tokens = self.target.lengths[row]
        self.drafter.begin([request])
        self.controller.begin(request, self.drafter.known(request))
        self.running.append(request)
        self._rows_changed()

    def _fill(self) -> None:
        """Reads prompts; a step without any takes no time here."""
        if self.target.ready == self.target.active:
            return
        begin, ready, whole = perf_counter(), self.target.ready, self.drafter.needs.prompts
        for part in self.target.fill(self.max_batched_tokens, self._layers, whole):
            deliver_part(self.drafter, self.running, part)
        synchronise(self.target.device)  # or the next round would pay for it
        seconds = perf_counter() - begin
        for request in self.running[ready:]:
            request.metrics.verify_seconds += seconds
            request.metrics.total_seconds += seconds
        self._rows_changed()

    def _release(self) -> None:
        if self._leaving:
            self._leaving = False
            self.waiting.drop_finished()
        self._retain([request for request in self.running if not request.finished])

    def _make_room(self) -> None:
        """Puts aside the rows that come last, as long as there are too many tokens. They are read
        again when there is room, and go on where they were."""
        staying = list(self.running)
        while self.room.lacks(staying):
            last = max(staying, key=self.waiting.place)
            staying.remove(last)
            self.waiting.put_aside(last)
        self._retain(staying)

    def _retain(self, staying: Sequence[Request]) -> None:
        """Keeps the rows of these requests, which stand in their order."""
        if len(staying) == len(self.running):
            return
        keep = [row for row, request in enumerate(self.running) if request in staying]
        leaving = [request for request in self.running if request not in staying]
        self.target.retain(keep, self._texts_that_leave(keep))
        self.drafter.end(leaving)
        self.running = list(staying)
        self._forget(leaving)
        self._rows_changed()

    @staticmethod
    def _forget(requests: Sequence[Request]) -> None:
        """Lets go of what was kept of texts that have ended: nobody looks at it again."""
        for request in requests:
            if request.finished:
                request.forked_from = None
                request.state.clear()

    def _rows_changed(self) -> None:
        self._pipeline = self._seeds = self._nothing = None

    def _texts_that_leave(self, keep: Sequence[int]) -> dict[int, list[int]]:
        """The tokens of the rows that leave, by row, for a target that saves what it has cached."""
        if not self.target.reuses:
            return {}
        leaving = [(row, one) for row, one in enumerate(self.running) if row not in keep]
        kept = [(row, one) for row, one in leaving if one.keep_cached and one.error is None]
        return {row: one.token_ids for row, one in kept}

    # -- the round -----------------------------------------------------------------------------

    def _try_round(self, played: Sequence[Request]) -> None:
        """Plays a round, or ends the request that stands in its way: the next step plays it."""
        try:
            self._round(played)
        except RowFault as error:
            played[error.row].fail(error)

    def _round(self, played: Sequence[Request]) -> None:
        """Plans, proposes, scores, verifies and commits, and shows everybody what came of it."""
        compiled = self.compile_seconds
        plan = self.controller.plan(played, self.verifier.terms)
        budgets = affordable(played, plan.budgets, self.target.most_nodes)
        rows = self._rows(played, plan)

        watch = Stopwatch(self.target.device)
        rows, proposal = self._propose(rows, budgets)
        watch.lap()
        scores, pending = self._score(rows, proposal)
        watch.lap()

        verdict = self.verifier(scores, proposal, rows)
        verdict, outcomes = on_host(verdict, proposal, self.drafter.name)
        dead_ends = rows.pipeline.dead_ends
        reported = logprobs_of(scores.logits, proposal, rows, played, outcomes)
        probs = None
        if self.drafter.needs.probs:
            probs = rows.pipeline.soft(scores.logits, branches_of(proposal), rows.history)

        self.target.commit([outcome.path for outcome in outcomes])
        emit(played, outcomes, reported, dead_ends)
        round = Round(
            rows,
            budgets,
            proposal,
            verdict,
            outcomes,
            watch.stop(),
            probs=probs,
            aux_logits=scores.aux_logits,
            dead_ends=dead_ends,
        )
        self._observe(round, played, scores, pending, self.compile_seconds == compiled)

    def _observe(
        self,
        round: Round,
        played: Sequence[Request],
        scores: Scores,
        pending: Sequence[Sequence[int]],
        steady: bool,
    ) -> None:
        """Shows everybody a round. pending: each row's committed tokens that were not cached before
        it. steady: nothing was compiled in it; compiling is no part of what a round costs."""
        count(played, round)
        # Before the drafter, which may take a pass to learn from it, and be interrupted in that.
        self.controller.record(played, round.outcomes, round.seconds if steady else None)
        for request in played:
            if request.finished:
                request.metrics.account = self.controller.account(request)
        fault = None
        try:
            deliver_round(self.drafter, played, scores, pending, round.outcomes)
            with round.rows.pipeline.drafting():
                self.drafter.observe(round)
        except RowFault as error:
            # The distributions of a row cannot be made for the drafter: its text ends with that
            # error, after the tokens of the round, which stay the target's.
            fault = error
            played[error.row].fail(error)
        for observer in self.observers:
            observer(round)
        if fault is not None:
            self._start_over()

    def _rows(self, played: Sequence[Request], plan: RoundPlan) -> Rows:
        device = self.target.device
        if self._pipeline is None or self._seeds is None:
            options = [request.options for request in played]
            self._pipeline = LogitsPipeline(options, self.vocabulary, device)
            self._seeds = to_device([request.seed for request in played], device)
        history = History(
            [request.prompt_ids for request in played], [request.output_ids for request in played]
        )
        return Rows(
            history,
            self._pipeline,
            self._seeds,
            terms=plan.terms,
            shape=plan.shape,
            requests=played,
        )

    def _propose(self, rows: Rows, budgets: Sequence[int]) -> tuple[Rows, Proposal]:
        """Returns what is drafted, and the rows with what was chosen for that."""
        if not any(budgets):
            if self._nothing is None:
                self._nothing = Proposal.empty(len(rows), self.target.device)
            return rows, self._nothing
        with rows.pipeline.drafting():
            if self.drafter.choices:
                found = self.drafter.look(rows, budgets)
                picks = self.controller.pick(rows.requests, found, budgets)
                rows = replace(rows, picks=picks)
            return rows, self.drafter.propose(rows, budgets).within(self.vocabulary)

    def _score(self, rows: Rows, proposal: Proposal) -> tuple[Scores, list[list[int]]]:
        """Returns the scores, and each row's committed tokens that were not cached before."""
        lengths = self.target.lengths
        pending = [rows.since(row, lengths[row]) for row in range(len(rows))]
        aux_tokens = self.verifier.aux_tokens(proposal)
        plan = Plan(
            pending, proposal.tokens, proposal.tree, aux_tokens, self._layers, proposal.precomputed
        )
        return self.target.score(plan), pending
