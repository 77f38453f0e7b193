"""The engine: admits requests into a ragged batch and plays rounds until they are finished."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TypeVar

import torch
from torch import Tensor

from outpace.core.logits_pipeline import History, LogitsPipeline, RowFault
from outpace.core.proposal import Proposal
from outpace.core.transfer import synchronise, to_device
from outpace.draft.base import Drafter, Rows
from outpace.engine.counting import counted, emit
from outpace.engine.logprobs import logprobs_of
from outpace.engine.order.base import Order
from outpace.engine.played import Played
from outpace.engine.request import Request
from outpace.engine.scheduler import Queue, Room
from outpace.engine.states import deliver_part
from outpace.engine.stopwatch import Stopwatch
from outpace.engine.trace import Observer, RoundTrace
from outpace.engine.verifier import Verifier, branches_of, on_host
from outpace.errors import ConfigError, PromptError, UnsupportedModel
from outpace.policy.base import Controller, RoundPlan, affordable, check_wish, is_reproducible
from outpace.targets.base import Plan, PromptInputs, Scores, Target

Done = TypeVar("Done")

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

    ``observers`` are shown a `RoundTrace` of every round.
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
        request.id = next(self._ids)
        self.waiting.add(request)

    def remove(self, *requests: Request) -> None:
        """Ends requests where they are. Their rows are free again now or, where another thread is
        playing a round, after that round."""
        for request in requests:
            request.abort()
            request.metrics.account = self.controller.account(request)
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
        self.target.reset()
        self.drafter.reset()
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
        info = request.as_row(source, self.verifier.coupled)
        self.drafter.expect(info)
        if source is None:
            reuse = request.keep_cached and not self.drafter.needs.states
            inputs = PromptInputs(request.began_with, reuse, request.source, request.media)
            row = self.target.admit(inputs)
        else:
            row = self.target.fork(source)
        if not again:
            request.cached_tokens = self.target.lengths[row]
        self.drafter.admit([info])
        self.controller.begin(request, self.drafter.known(row))
        self.running.append(request)
        self._rows_changed()

    def _fill(self) -> None:
        """Reads prompts; a step without any takes no time here."""
        if self.target.ready == self.target.active:
            return
        begin, ready, whole = perf_counter(), self.target.ready, self.drafter.needs.prompts
        for part in self.target.fill(self.max_batched_tokens, self._layers, whole):
            deliver_part(self.drafter, part)
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
        self.target.retain(keep, self._texts_that_leave(keep))
        self.drafter.retain(keep)
        self.running = list(staying)
        self._rows_changed()

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
        rows, compiled = None, self.compile_seconds
        try:
            plan = self.controller.plan(played, self.verifier.terms)
            budgets = affordable(played, plan.budgets, self.target.most_nodes)
            rows = self._rows(played, plan)
            done = self._round(played, rows, budgets)
        except RowFault as error:
            if rows is not None:
                self.drafter.rewind(rows)
            played[error.row].fail(error)
        else:
            self._learn(done, compiled)

    def _round(self, played: Sequence[Request], rows: Rows, budgets: Sequence[int]) -> Played:
        """Plays a round up to the tokens that it brings each text."""
        watch = Stopwatch(self.target.device)
        proposal = self._propose(rows, budgets)
        watch.lap()
        scores, pending = self._score(rows, proposal)
        watch.lap()
        judgement = self.verifier(scores, proposal, rows)
        verdict, decisions = on_host(judgement.verdict, proposal)
        dead_ends = rows.pipeline.dead_ends
        reported = logprobs_of(scores.logits, proposal, rows, played, decisions)
        probs = None
        if self.drafter.needs.probs:
            probs = rows.pipeline.soft(scores.logits, branches_of(proposal), rows.history)
        self.target.commit([decision.path for decision in decisions])
        emitted = emit(played, decisions, reported, dead_ends)
        trace = RoundTrace(
            requests=played,
            rows=rows,
            budgets=budgets,
            proposal=proposal,
            methods=proposal.methods or [self.drafter.name] * len(played),
            decisions=decisions,
            emitted=emitted,
            rule=judgement.rule,
            probs=judgement.probs,
            dead_ends=dead_ends,
            seconds=watch.stop(),
        )
        return Played(trace, verdict, scores, pending, probs)

    def _learn(self, round: Played, compiled: float) -> None:
        """Tells everybody of a round. compiled: the `compile_seconds` before it."""
        trace = round.trace
        outcomes = counted(
            trace.requests, trace.decisions, trace.emitted, trace.seconds, trace.methods
        )
        steady = self.compile_seconds == compiled  # compiling is no price of a round
        # Before the drafter, which may take a pass to be told, and be interrupted in that.
        self.controller.record(trace.requests, outcomes, trace.seconds if steady else None)
        for request in trace.requests:
            if request.finished:
                request.metrics.account = self.controller.account(request)
        told = round.tell(self.drafter)
        for observer in self.observers:
            observer(trace)
        if not told:
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
            reproducible=[is_reproducible(request, self.verifier.coupled) for request in played],
            route=plan.route,
            last_ids=[request.last_ids for request in played],
        )

    def _propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        if any(budgets):
            with rows.pipeline.drafting():
                return self.drafter.propose(rows, budgets).within(self.vocabulary)
        if self._nothing is None:
            self._nothing = Proposal.empty(len(rows), self.target.device)
        return self._nothing

    def _score(self, rows: Rows, proposal: Proposal) -> tuple[Scores, list[list[int]]]:
        """Returns the scores, and each row's committed tokens that were not cached before."""
        lengths = self.target.lengths
        pending = [rows.since(row, lengths[row]) for row in range(len(rows))]
        aux_tokens = self.verifier.aux_tokens(proposal)
        plan = Plan(
            pending, proposal.tokens, proposal.tree, aux_tokens, self._layers, proposal.precomputed
        )
        return self.target.score(plan), pending
