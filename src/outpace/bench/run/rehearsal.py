"""Rounds of an idle engine's drafter and target over a given text, one step at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from outpace.core.logits_pipeline import History, LogitsPipeline, RowOptions
from outpace.core.params import SamplingParams
from outpace.core.proposal import Proposal, Verdict
from outpace.core.stats import Seconds
from outpace.core.trees.tree import Tree
from outpace.draft.base import Round, RowInfo, Rows
from outpace.engine.states import deliver_part, deliver_round
from outpace.engine.verifier import Decision, branches_of
from outpace.llm import LLM
from outpace.targets.base import Plan, PromptInputs, ReadPart, Scores, Target

PERIOD = 32
"""Different tokens of the text, which goes round and round: look-ups find something in it."""


class Rehearsal:
    """A batch of rows with the same text, which grows by one token per round. No draft is accepted.

    The drafter is told all that the engine would tell it: the states of committed tokens, the
    target's distributions, what became of its auxiliary tokens. So what it drafts costs what it
    costs in use.
    """

    def __init__(self, llm: LLM, rows: int, context: int, temperature: float) -> None:
        """context: tokens of the text before the first round."""
        self._target, self._drafter = llm.engine.target, llm.engine.drafter
        self._vocabulary, self._terms = llm.engine.vocabulary, llm.engine.verifier.terms
        self._layers = frozenset(self._drafter.needs.states)
        self._prompts = [text_of(context, self._vocabulary) for _ in range(rows)]
        self._outputs: list[list[int]] = [[] for _ in range(rows)]
        self._options = RowOptions(SamplingParams(temperature=temperature).resolve({}))

    def begin(self) -> None:
        """Admits the rows. The target reads the text once, however many rows there are."""
        rows = range(len(self._prompts))
        for row in rows:
            info = RowInfo(row, self._prompts[row])
            self._drafter.expect(info)
            self._drafter.admit([info])
        for chunk in fill(self._target, len(rows), self._prompts[0], self._layers):
            for row in rows:
                deliver_part(self._drafter, replace(chunk, rows=[row]))

    def rows(self) -> Rows:
        """Returns the batch as the drafter sees it when a round begins."""
        device, count = self._target.device, len(self._prompts)
        distribution = LogitsPipeline([self._options] * count, self._vocabulary, device)
        history = History(self._prompts, self._outputs)
        return Rows(history, distribution, torch.arange(count, device=device), self._terms)

    def propose(self, rows: Rows, nodes: int) -> Proposal:
        """Returns the drafter's proposal of at most n nodes in each row."""
        with rows.pipeline.drafting():
            return self._drafter.propose(rows, [nodes] * len(rows))

    def score(self, rows: Rows, proposal: Proposal) -> Callable[[], None]:
        """Has the target score a proposal and commits none of its nodes; returns what tells the
        drafter of the round, to be called once."""
        lengths = self._target.lengths
        pending = [rows.since(row, lengths[row]) for row in range(len(rows))]
        plan = Plan(
            pending,
            proposal.tokens,
            proposal.tree,
            proposal.aux_tokens,
            self._layers,
            proposal.precomputed,
        )
        scores = self._target.score(plan)
        self._target.commit([[]] * len(pending))
        probs = None
        if self._drafter.needs.probs:
            probs = rows.pipeline.soft(scores.logits, branches_of(proposal), rows.history)
        token = token_at(rows.length(0), self._vocabulary)
        for output in self._outputs:
            output.append(token)
        return partial(self._tell, rows, proposal, scores, pending, probs, token)

    def _tell(
        self,
        rows: Rows,
        proposal: Proposal,
        scores: Scores,
        pending: list[list[int]],
        probs: Tensor | None,
        token: int,
    ) -> None:
        """Tells the drafter that its draft was refused and the token committed instead."""
        refused = Decision(path=[], accepted=[], next_token=token, drafted=0, depth=0)
        deliver_round(self._drafter, scores, pending, [refused] * len(rows))
        root = torch.zeros_like(rows.positions)
        verdict = Verdict(root, torch.full_like(root, token), host=[0] * len(rows))
        seconds = Seconds(0.0, 0.0, 0.0)
        with rows.pipeline.drafting():
            self._drafter.observe(rows, Round(proposal, verdict, seconds, probs, scores.aux_logits))


@contextmanager
def rehearsing(llm: LLM, rows: int, context: int, temperature: float) -> Iterator[Rehearsal]:
    """Gives a rehearsal with its rows admitted; they are gone afterwards."""
    rehearsal = Rehearsal(llm, rows, context, temperature)
    try:
        rehearsal.begin()
        yield rehearsal
    finally:
        llm.engine.target.retain([])
        llm.engine.drafter.retain([])


def token_at(place: int, vocabulary: int) -> int:
    """Returns the token at a place (from 0) of the text."""
    return place % min(PERIOD, vocabulary)


def text_of(tokens: int, vocabulary: int) -> list[int]:
    """Returns the first n tokens of the text."""
    return [token_at(place, vocabulary) for place in range(tokens)]


def fill(
    target: Target, rows: int, text: list[int], layers: frozenset[int] = frozenset()
) -> list[ReadPart]:
    """Gives a target without rows n rows of one text, all but its last token cached.

    The text is read once, in the parts that are returned, with the states of these layers.
    """
    *before, _ = text
    target.admit(PromptInputs(text))
    chunks = []
    while not target.ready:
        chunks += target.fill(len(text), layers)
    if left := before[target.lengths[0] :]:
        nothing = torch.zeros(1, 0, dtype=torch.long, device=target.device)
        scores = target.score(Plan([left], nothing, Tree.chain(1, 0, target.device), layers=layers))
        target.commit([[]])
        chunks.append(ReadPart([0], [left], scores.states))
    for _ in range(rows - 1):
        target.fork(0)
    return chunks
