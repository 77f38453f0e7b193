"""The engine: admits requests into a ragged batch and plays rounds until they are finished."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from time import perf_counter

import torch
from torch import Tensor

from outpace.core.law import History, LawMaker, RowFault
from outpace.core.proposal import Drawn, Proposal
from outpace.core.transfer import to_device
from outpace.draft.base import Drafter, Rows
from outpace.engine.logprobs import logprobs_of
from outpace.engine.request import Logprob, Request
from outpace.engine.scoring import Scorer
from outpace.engine.verifier import Decision, Verifier, branches_of, decide
from outpace.policy.controller import Controller, Outcome, affordable
from outpace.policy.cost import Seconds
from outpace.targets.hf.fixed import StepRunner
from outpace.targets.hf.runner import PREFILL_CHUNK, Runner
from outpace.targets.hf.weights import weight_bytes


class Engine:
    """Decodes requests with one target, one drafter and one rule.

    A round, for all rows at once: the drafter proposes, the target scores the last committed token
    and the draft in one pass, the rule decides, the accepted tokens and one more are committed.
    With an empty proposal a round is plain decoding. reread: the tokens between the two copies of
    the draft, for rules with a second pass. verdicts: plays those of fixed shape.
    """

    def __init__(
        self,
        target: Runner,
        drafter: Drafter,
        verifier: Verifier,
        controller: Controller,
        vocabulary: int,
        reread: Sequence[int] = (),
        verdicts: StepRunner | None = None,
    ) -> None:
        for drawn in [Drawn.POINT] if verifier.coupled else drafter.draws:
            verifier.rule.check(drawn, drafter.trees)
        self.target = target
        self.drafter = drafter
        self.verifier = verifier
        self.controller = controller
        self.vocabulary = vocabulary
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._verdicts = verdicts
        self._scorer = Scorer(target, verifier.rule.needs, reread)
        self._law: LawMaker | None = None
        self._seeds: Tensor | None = None
        self._nothing: Proposal | None = None

    # -- requests ------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a request; it joins the batch when a row is free."""
        self.waiting.append(request)

    @torch.inference_mode()
    def remove(self, request: Request) -> None:
        """Ends a request where it is."""
        request.abort()
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self._release()

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of weights and caches."""
        own = self.drafter.weight_bytes
        return {
            "target_weights": weight_bytes(self.target.model),
            "target_cache": self.target.cache.nbytes,
            "drafter_weights": own,
            "drafter_cache": self.drafter.nbytes - own,
        }

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling or recording passes so far."""
        own = self._verdicts.seconds if self._verdicts is not None else 0.0
        return self.target.compile_seconds + self.drafter.compile_seconds + own

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Admits what fits, plays one round, and returns the requests that took part in it.

        A request whose options contradict each other ends with its error, and the others go on.
        """
        self._admit()
        if not self.running:
            return []
        played = list(self.running)
        try:
            self._round()
        except RowFault as error:
            self.drafter.rewind(self._rows())
            self.running[error.row].fail(error)
        self._release()
        return played

    def _admit(self) -> None:
        new: list[Request] = []
        while self.waiting and len(self.running) + len(new) < self.target.cache.rows:
            new.append(self.waiting.popleft())
        if not new:
            return
        begin = perf_counter()
        first = self.target.active
        prompts = [request.prompt_ids for request in new]
        self.target.admit(len(new))
        self.drafter.admit(prompts)
        # The last prompt token stays pending: it is the root of the first round. Where all rows
        # have as much to read, the last of it is read in the pass of that round.
        alike = first == 0 and len({len(prompt) for prompt in prompts}) == 1
        keep = (len(prompts[0]) - 1) % PREFILL_CHUNK if alike else 0
        heads = [prompt[: len(prompt) - 1 - keep] for prompt in prompts]
        if any(heads):
            self.target.prefill(first, heads)
        self.running += new
        self._rows_changed()
        seconds = perf_counter() - begin
        for request in new:
            request.metrics.verify_seconds += seconds
            request.metrics.total_seconds += seconds

    def _release(self) -> None:
        keep = [row for row, request in enumerate(self.running) if request.finish_reason is None]
        if len(keep) == len(self.running):
            return
        self.target.retain(keep)
        self.drafter.retain(keep)
        self.running = [self.running[row] for row in keep]
        self._rows_changed()

    def _rows_changed(self) -> None:
        self._law = self._seeds = self._nothing = None

    # -- the round -----------------------------------------------------------------------------

    def _round(self) -> None:
        times, compiled = [perf_counter()], self.compile_seconds
        budgets = affordable(self.running, self.controller.budgets(self.running))
        rows = self._rows()
        proposal = self._propose(rows, budgets)
        times.append(perf_counter())
        pending = self._pending(rows)
        scores = self._scorer(to_device(pending, self.target.device), proposal)
        times.append(perf_counter())
        verdict, decisions = decide(self.verifier, scores, proposal, rows, self._verdicts)
        dead_ends = rows.law.dead_ends
        reported = logprobs_of(scores.logits, branches_of(proposal), rows, self.running, decisions)
        self._commit(len(pending[0]), proposal, decisions)
        if proposal.tree.size:
            self.drafter.observe(rows, proposal, verdict)
        emitted = self._emit(decisions, reported, dead_ends)
        times.append(perf_counter())
        outcomes = self._count(decisions, emitted, times)
        seconds = Seconds(*(b - a for a, b in itertools.pairwise(times)))
        steady = self.compile_seconds == compiled  # compiling is no price of a round
        self.controller.record(self.running, outcomes, seconds if steady else None)

    def _rows(self) -> Rows:
        device = self.target.device
        if self._law is None or self._seeds is None:
            options = [request.options for request in self.running]
            self._law = LawMaker(options, self.vocabulary, device)
            self._seeds = to_device([request.seed for request in self.running], device)
        history = History(
            [request.prompt_ids for request in self.running],
            [request.output_ids for request in self.running],
        )
        positions = to_device([request.length for request in self.running], device)
        shape = self.controller.shape
        return Rows(history, self._law, self._seeds, positions, self.verifier.brief, shape)

    def _propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        if not any(budgets):
            if self._nothing is None:
                self._nothing = Proposal.empty(len(rows), self.target.device)
            return self._nothing
        return self.drafter.propose(rows, budgets)

    def _pending(self, rows: Rows) -> list[list[int]]:
        """Each row's committed tokens that the target has not cached, up to the root: as many in
        all rows."""
        pending = [rows.since(row, cached) for row, cached in enumerate(self.target.lengths)]
        if len({len(tokens) for tokens in pending}) > 1:
            for row, tokens in enumerate(pending):
                if len(tokens) > 1:
                    self.target.prefill(row, [tokens[:-1]])
            pending = [tokens[-1:] for tokens in pending]
        return pending

    def _commit(self, pending: int, proposal: Proposal, decisions: Sequence[Decision]) -> None:
        if proposal.tree.is_chain:
            self.target.advance([pending + len(decision.path) for decision in decisions])
        else:
            self.target.advance_paths(pending, [decision.path for decision in decisions])

    def _emit(
        self,
        decisions: Sequence[Decision],
        reported: Sequence[list[dict[int, Logprob]]],
        dead_ends: Mapping[int, Mapping[int, RowFault]],
    ) -> list[int]:
        """Appends to each text; returns how many tokens each took before a stop condition.

        Behind a node that left no token to go on with, nothing is the target's.
        """
        emitted = []
        for row, (request, decision) in enumerate(zip(self.running, decisions, strict=True)):
            dead = dead_ends.get(row, {})
            end = next((at for at, node in enumerate(decision.path, 1) if node in dead), None)
            taken = request.extend(decision.tokens[:end])
            if end is not None and request.finish_reason is None:
                request.fail(dead[decision.path[end - 1]])
            request.logprobs += reported[row][:taken]
            emitted.append(taken)
        return emitted

    def _count(
        self, decisions: Sequence[Decision], emitted: Sequence[int], times: Sequence[float]
    ) -> list[Outcome]:
        """Counts the round for each request; returns what came of it."""
        draft, verify, sample = (b - a for a, b in itertools.pairwise(times))
        taken_of = zip(decisions, emitted, strict=True)
        accepted = [min(taken, len(decision.path)) for decision, taken in taken_of]
        for request, decision, kept, taken in zip(
            self.running, decisions, accepted, emitted, strict=True
        ):
            metrics = request.metrics
            metrics.count_round(decision.drafted, kept, taken)
            metrics.count_positions(decision.depth, kept)
            metrics.draft_seconds += draft
            metrics.verify_seconds += verify
            metrics.sample_seconds += sample
            metrics.total_seconds += draft + verify + sample
        return [
            Outcome(decision.drafted, decision.depth, kept, taken, tuple(decision.path[:kept]))
            for decision, kept, taken in zip(decisions, accepted, emitted, strict=True)
        ]
