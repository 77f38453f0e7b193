"""The running batch: requests join it, are read, are preempted, and leave."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from torch import Tensor

from outpace.core.logits_pipeline import History, LogitsPipeline
from outpace.core.proposal import Proposal
from outpace.core.transfer import synchronise, to_device
from outpace.draft.base import Drafter
from outpace.draft.round import Rows
from outpace.engine.request import EngineRequest
from outpace.engine.round_parts import deliver_prompt_states
from outpace.engine.scheduler import RequestQueue, TokenLimit
from outpace.errors import ConfigError, ProcessLost, PromptError, UnsupportedModel
from outpace.policy.base import Controller, RoundPlan
from outpace.targets.base import PromptInputs, Target


class Batch:
    """The requests that have rows of a target, in the order of these, and those that wait.

    Target and drafter learn of each that joins or leaves.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        waiting: RequestQueue,
        token_limit: TokenLimit,
        vocabulary: int,
    ) -> None:
        self.target, self.drafter = target, drafter
        self.waiting = waiting
        self.running: list[EngineRequest] = []
        self.token_limit = token_limit
        self.vocabulary = vocabulary
        self._pipeline: LogitsPipeline | None = None
        self._seeds: Tensor | None = None
        self._empty_proposal: Proposal | None = None

    def rows(self, scheduled: Sequence[EngineRequest], plan: RoundPlan) -> Rows:
        """Returns the rows of a round as a drafter sees them."""
        device = self.target.device
        if self._pipeline is None or self._seeds is None:
            options = [request.options for request in scheduled]
            self._pipeline = LogitsPipeline(options, self.vocabulary, device)
            self._seeds = to_device([request.seed for request in scheduled], device)
        history = History(
            [request.prompt_ids for request in scheduled],
            [request.output_ids for request in scheduled],
        )
        return Rows(
            history,
            self._pipeline,
            self._seeds,
            terms=plan.terms,
            shape=plan.shape,
            requests=scheduled,
        )

    def empty_proposal(self, rows: int) -> Proposal:
        """Returns the proposal of a round without drafts."""
        if self._empty_proposal is None:
            self._empty_proposal = Proposal.empty(rows, self.target.device)
        return self._empty_proposal

    # -- joining -------------------------------------------------------------------------------

    def admit(self, controller: Controller) -> None:
        """Gives free rows to waiting requests."""
        while self.target.num_rows < self.target.max_rows:
            request = self.waiting.first
            if request is None:
                return
            if request.finished:
                self.waiting.drop_finished()
                continue
            source = self._row_to_fork(request)
            if source is not None and not self._can_fork(source):
                return  # soon: its prompt is being read for both
            if not self.token_limit.admits(self.running, request):
                return  # nobody overtakes it, so that it has its room soon
            if self._begins(request, source, controller):
                self.waiting.join(request)

    def fork_finished_rows(self, controller: Controller) -> None:
        """Lets samples that wait join while the last row with their prompt is still there, if its
        own text has just ended: they fork from it, and the prompt is not read again."""
        if not any(one.finished for one in self.running):
            return
        first = self.waiting.first
        source = None if first is None else self._row_to_fork(first)
        if source is None or not self.running[source].finished:
            return
        ended = self.running[source]
        self.retain([one for one in self.running if one is ended or not one.finished])
        self.admit(controller)

    def _row_to_fork(self, request: EngineRequest) -> int | None:
        """A row with the same prompt; one whose text has ended only if there is no other."""
        drafter = self.drafter
        forks = not drafter.needs.hidden_layers or drafter.capabilities.copies_prompts
        if request.group is None or not forks:
            return None
        ids = request.token_ids
        rows = [
            row
            for row, other in enumerate(self.running)
            if other.group == request.group and other.admitted_token_ids == ids
        ]
        return min(rows, key=lambda row: self.running[row].finished, default=None)

    def _can_fork(self, row: int) -> bool:
        read = self.target.lengths[row] >= len(self.running[row].admitted_token_ids) - 1
        return read and self.target.num_ready_rows == self.target.num_rows

    def _begins(self, request: EngineRequest, source: int | None, controller: Controller) -> bool:
        """Begins a request, or ends it where its prompt cannot be read; returns whether it has a
        row. After a failure that nobody foresees, such as memory that runs out, what target and
        drafter know of their rows may be anything: all other rows begin anew."""
        try:
            self._begin(request, source, controller)
        except (PromptError, UnsupportedModel) as error:
            request.fail(error)
            request.metrics.account = controller.account(request)
        except (ConfigError, ProcessLost):
            raise  # the whole engine cannot go on, as where its model has been changed
        except Exception as error:
            request.fail(error)
            request.metrics.account = controller.account(request)
            self.start_over()
        return not request.finished

    def _begin(self, request: EngineRequest, source: int | None, controller: Controller) -> None:
        again, request.admitted_token_ids = bool(request.admitted_token_ids), request.token_ids
        self.drafter.check(request)
        request.forked_from = None if source is None else self.running[source]
        if source is None:
            reuse = self.target.has_prefix_cache and request.keep_cached
            most = self.drafter.cached_prefix(request) if reuse else 0
            inputs = PromptInputs(request.admitted_token_ids, most, request.source, request.media)
            row = self.target.admit(inputs)
            request.cached_prefix = self.target.lengths[row]
        else:
            row, request.cached_prefix = self.target.fork(source), 0
        if not again:
            request.cached_tokens = self.target.lengths[row]
        self.drafter.begin([request])
        controller.begin(request, self.drafter.computed_tokens(request))
        self.running.append(request)
        self._rows_changed()

    def prefill(self, tokens: int, layers: frozenset[int]) -> None:
        """Reads about this many tokens of prompts; a step without any takes no time here."""
        if self.target.num_ready_rows == self.target.num_rows:
            return
        begin, ready, full = (
            perf_counter(),
            self.target.num_ready_rows,
            self.drafter.needs.full_prefill,
        )
        for part in self.target.prefill(tokens, layers, full):
            deliver_prompt_states(self.drafter, self.running, part)
        synchronise(self.target.device)  # or the next round would pay for it
        seconds = perf_counter() - begin
        for request in self.running[ready:]:
            request.metrics.verify_seconds += seconds
            request.metrics.total_seconds += seconds
        self._rows_changed()

    # -- leaving -------------------------------------------------------------------------------

    def preempt(self) -> None:
        """Takes the rows of the requests that come last, as long as there are too many tokens.
        These wait, are read again when there is room, and go on where they were."""
        staying = list(self.running)
        while self.token_limit.exceeded(staying):
            last = max(staying, key=self.waiting.place)
            staying.remove(last)
            self.waiting.preempt(last)
        self.retain(staying)

    def retain(self, staying: Sequence[EngineRequest]) -> None:
        """Keeps the rows of these requests, which stand in their order."""
        if len(staying) == len(self.running):
            return
        keep = [row for row, request in enumerate(self.running) if request in staying]
        leaving = [request for request in self.running if request not in staying]
        self.target.retain(keep, self._texts_that_leave(keep))
        self.drafter.end(leaving)
        self.running = list(staying)
        _forget(leaving)
        self._rows_changed()

    def start_over(self) -> None:
        """Puts all unfinished requests back in front of the queue: what target and drafter know of
        them may be anything."""
        for request in self.running:
            request.finish_extend()
            request.recover()
        self.target.reset()
        self.drafter.end(self.running, interrupted=True)
        _forget(self.running)
        self.waiting.put_back([row for row in self.running if not row.finished])
        self.running = []
        self.waiting.drop_finished()
        self._rows_changed()

    def _rows_changed(self) -> None:
        self._pipeline = self._seeds = self._empty_proposal = None

    def _texts_that_leave(self, keep: Sequence[int]) -> dict[int, list[int]]:
        """The tokens of the rows that leave, by row, for a target that saves what it has cached."""
        if not self.target.has_prefix_cache:
            return {}
        leaving = [(row, one) for row, one in enumerate(self.running) if row not in keep]
        kept = [(row, one) for row, one in leaving if one.keep_cached and one.error is None]
        return {row: one.token_ids for row, one in kept}


def _forget(requests: Sequence[EngineRequest]) -> None:
    """Lets go of what was kept of texts that have ended: nobody looks at it again."""
    for request in requests:
        if request.finished:
            request.forked_from = None
            request.state.clear()
