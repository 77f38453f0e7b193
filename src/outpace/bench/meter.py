"""Times of one engine's parts alone: a draft of k tokens, a pass that scores n tokens. Timed are
rounds of an idle engine's drafter and target over a given text, one step at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import TypeVar

import torch

from outpace.bench.theory import Times
from outpace.core.logits_pipeline import History, LogitsPipeline, RowOptions
from outpace.core.params import SamplingParams
from outpace.core.proposal import Proposal, Verdict
from outpace.core.request import Request
from outpace.core.stats import Seconds
from outpace.core.transfer import synchronise
from outpace.core.trees.tree import Tree
from outpace.draft.base import Round, Rows
from outpace.engine.round_parts import deliver_prompt_states, deliver_round_states
from outpace.engine.verifier import to_host
from outpace.errors import ConfigError
from outpace.llm import LLM
from outpace.targets.base import PrefillChunk, PromptInputs, ScoreInputs, Scores, Target
from outpace.targets.hf.kinds import is_encoder_decoder

PERIOD = 32
"""Different tokens of the text, which goes round and round: look-ups find something in it."""


class Rehearsal:
    """A batch of rows with the same text, which grows by one token per round. No draft is accepted.

    The drafter is given all that the engine would give it: the states of committed tokens, the
    target's distributions, what became of its auxiliary tokens. So what it drafts costs what it
    costs in use.
    """

    def __init__(self, llm: LLM, rows: int, context: int, temperature: float) -> None:
        """context: tokens of the text before the first round."""
        self._target, self._drafter = llm.engine.target, llm.engine.drafter
        self._vocabulary, self._terms = llm.engine.vocabulary, llm.engine.verifier.terms
        self._layers = frozenset(self._drafter.needs.hidden_layers)
        self._options = RowOptions(SamplingParams(temperature=temperature).resolve({}))
        self.requests = [
            Request(
                text_of(context, self._vocabulary),
                self._options,
                seed=row,
                max_tokens=self._target.max_length,
                id=row,
                keep_cached=False,
            )
            for row in range(rows)
        ]

    def begin(self) -> None:
        """Admits the rows. The target reads the text once, however many rows there are."""
        for request in self.requests:
            self._drafter.check(request)
            self._drafter.begin([request])
        text = self.requests[0].prompt_ids
        for chunk in prefill(self._target, len(self.requests), text, self._layers):
            for row in range(len(self.requests)):
                deliver_prompt_states(self._drafter, self.requests, replace(chunk, rows=[row]))

    def rows(self) -> Rows:
        """Returns the batch as the drafter sees it when a round begins."""
        device, count = self._target.device, len(self.requests)
        pipeline = LogitsPipeline([self._options] * count, self._vocabulary, device)
        history = History(
            [request.prompt_ids for request in self.requests],
            [request.output_ids for request in self.requests],
        )
        seeds = torch.arange(count, device=device)
        return Rows(history, pipeline, seeds, self._terms, requests=self.requests)

    def propose(self, rows: Rows, nodes: int) -> Proposal:
        """Returns the drafter's proposal of at most n nodes in each row."""
        with rows.pipeline.drafting():
            return self._drafter.propose(rows, [nodes] * len(rows))

    def score(self, rows: Rows, proposal: Proposal) -> Callable[[], None]:
        """Has the target score a proposal, of which nothing is accepted; returns what shows the
        drafter that round, to be called once."""
        lengths = self._target.lengths
        pending = [rows.since(row, lengths[row]) for row in range(len(rows))]
        inputs = ScoreInputs(
            pending,
            proposal.tokens,
            proposal.tree,
            proposal.aux_tokens,
            self._layers,
            proposal.precomputed,
        )
        scores = self._target.score(inputs)
        self._target.commit([[]] * len(pending))
        softmax_probs = None
        if self._drafter.needs.softmax_probs:
            softmax_probs = rows.pipeline.softmax_probs(
                scores.logits, proposal.branches, rows.history
            )
        token = token_at(rows.lengths[0], self._vocabulary)
        root = torch.zeros_like(rows.positions)
        refused = Verdict(root, torch.full_like(root, token))
        refused, outcomes, _ = to_host(refused, proposal, self._drafter.name)
        for request, outcome in zip(self.requests, outcomes, strict=True):
            request.output_ids.append(token)
            outcome.emitted = 1
        budgets = [outcome.drafted for outcome in outcomes]
        nothing = Seconds(0.0, 0.0, 0.0)
        round = Round(
            rows, budgets, proposal, refused, outcomes, nothing, softmax_probs, scores.aux_logits
        )
        return partial(self._show, round, scores, pending)

    def _show(self, round: Round, scores: Scores, pending: list[list[int]]) -> None:
        """Shows the drafter a round in which its draft was refused."""
        deliver_round_states(self._drafter, self.requests, scores, pending, round.outcomes)
        with round.rows.pipeline.drafting():
            self._drafter.observe(round)


@contextmanager
def rehearsing(llm: LLM, rows: int, context: int, temperature: float) -> Iterator[Rehearsal]:
    """Gives a rehearsal with its rows admitted; they are gone afterwards."""
    rehearsal = Rehearsal(llm, rows, context, temperature)
    try:
        rehearsal.begin()
        yield rehearsal
    finally:
        llm.engine.target.retain([])
        llm.engine.drafter.end(rehearsal.requests)


def token_at(place: int, vocabulary: int) -> int:
    """Returns the token at a place (from 0) of the text."""
    return place % min(PERIOD, vocabulary)


def text_of(tokens: int, vocabulary: int) -> list[int]:
    """Returns the first n tokens of the text."""
    return [token_at(place, vocabulary) for place in range(tokens)]


def prefill(
    target: Target, rows: int, text: list[int], layers: frozenset[int] = frozenset()
) -> list[PrefillChunk]:
    """Gives a target without rows n rows of one text, all but its last token cached.

    The text is read once, in the parts that are returned, with the states of these layers.
    """
    *before, _ = text
    target.admit(PromptInputs(text))
    chunks = []
    while not target.num_ready_rows:
        chunks += target.prefill(len(text), layers)
    if left := before[target.lengths[0] :]:
        nothing = torch.zeros(1, 0, dtype=torch.long, device=target.device)
        scores = target.score(
            ScoreInputs([left], nothing, Tree.chain(1, 0, target.device), layers=layers)
        )
        target.commit([[]])
        chunks.append(PrefillChunk([0], [left], scores.hidden_states))
    for _ in range(rows - 1):
        target.fork(0)
    return chunks


# -- the meter ---------------------------------------------------------------------------------


Result = TypeVar("Result")


def has_parts(llm: LLM) -> bool:
    """Returns whether the parts of an engine's rounds can be timed alone: those of an
    encoder-decoder cannot, whose texts need a source."""
    return not is_encoder_decoder(llm.target.model)


@dataclass
class Meter:
    """Collects samples for one engine, batch size, context and temperature.

    Samples can be taken at several moments of a run, so that they see the same machine as it did;
    the median counts. Only of an engine that `has_parts`; ``ConfigError`` for another one.
    """

    llm: LLM
    batch: int
    context: int
    temperature: float = 0.0
    clock: Callable[[], float] = perf_counter
    _draft: dict[int, list[float]] = field(default_factory=dict)
    _verify: dict[int, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not has_parts(self.llm):
            raise ConfigError(
                f"{self.llm.target.name} is an encoder-decoder, whose rounds' parts cannot be "
                "timed alone: compare whole texts, with outpace bench run."
            )

    def sample(
        self, drafts: Iterable[int] = (), scored: Iterable[int] = (1,), repeats: int = 3
    ) -> None:
        """Takes ``repeats`` samples of each draft length and each number of scored tokens.

        A sample of a draft counts for the nodes that were drafted, which may be fewer than asked
        for: some drafters have a longest draft, and a look-up may find less.
        """
        for n, seconds in self._verifying(sorted(set(scored)), repeats):
            self._verify.setdefault(n, []).append(seconds)
        for nodes, seconds in self._drafting(sorted(set(drafts) - {0}), repeats):
            if nodes:
                self._draft.setdefault(nodes, []).append(seconds)

    @property
    def times(self) -> Times:
        """The medians so far."""
        return Times(
            draft={k: median(found) for k, found in self._draft.items()},
            verify={n: median(found) for n, found in self._verify.items()},
        )

    @torch.inference_mode()
    def _verifying(self, scored: Sequence[int], repeats: int) -> list[tuple[int, float]]:
        """Returns how many tokens were scored and the seconds, for each number and repeat. The
        context is read once for all of them, since nothing that is scored is committed."""
        if not scored:
            return []
        target = self.llm.engine.target
        text = text_of(self.context + 1, self.llm.engine.vocabulary)
        found = []
        try:
            with target.step_context():
                prefill(target, self.batch, text)
                for n in scored:
                    score = partial(target.score, self._inputs(text[-1], n))
                    # the first one may have to make buffers
                    taken = [self._timed(score)[0] for _ in range(repeats + 1)][1:]
                    found += [(n, seconds) for seconds in taken]
        finally:
            target.retain([])
        return found

    def _inputs(self, root: int, n: int) -> ScoreInputs:
        """What a pass reads over the root and a draft, n tokens in all."""
        device = self.llm.engine.target.device
        drafted = torch.full((self.batch, n - 1), root, device=device)
        return ScoreInputs([[root]] * self.batch, drafted, Tree.chain(self.batch, n - 1, device))

    @torch.inference_mode()
    def _drafting(self, drafts: Sequence[int], repeats: int) -> list[tuple[int, float]]:
        """Returns how many nodes rounds that may draft k have drafted, for each k and repeat, and
        the drafter's seconds: for the draft, and for what it does once it observes what became of
        it. The context is read once for all of them, and grows by a token a round."""
        if not drafts:
            return []
        found = []
        step = self.llm.engine.target.step_context()
        text = rehearsing(self.llm, self.batch, self.context, self.temperature)
        with step, text as rehearsal:
            for k in drafts:
                taken = []
                for _ in range(repeats + 1):
                    rows = rehearsal.rows()
                    drafting, proposal = self._timed(partial(rehearsal.propose, rows, k))
                    observing, _ = self._timed(rehearsal.score(rows, proposal))
                    taken.append((int(proposal.counts.max()), drafting + observing))
                found += taken[1:]
        return found

    def _timed(self, work: Callable[[], Result]) -> tuple[float, Result]:
        device = self.llm.engine.target.device
        synchronise(device)
        begin = self.clock()
        result = work()
        synchronise(device)
        return self.clock() - begin, result
