"""How each seeded defect gets into an engine that was built without it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import outpace.engine.verifier as judging
import outpace.input_processor
import outpace.targets.hf.runner as running
from outpace import LLM
from outpace.core.logits_pipeline import Branches, History, LogitsPipeline
from outpace.core.proposal import Proposal, Sampled
from outpace.core.rng import Role, inverse_cdf, uniform
from outpace.draft.base import Rows
from outpace.draft.chains import Chains
from outpace.engine import engine
from outpace.engine.batch import Batch
from outpace.engine.request import EngineRequest
from outpace.engine.verifier import Verifier
from outpace.methods.models.draft_model import DraftModel
from outpace.targets.hf.cache import SlotCache
from outpace.targets.hf.masks import PassLayout, tree_layout
from outpace.targets.hf.runner import Runner
from outpace.targets.hf.target import HFTarget
from outpace.verify.base import accept_matching, draw_verdict
from outpace.verify.lossless.token import TokenRule
from outpace.verify.probs import normalize, select_node

Patch = Callable[[pytest.MonkeyPatch, LLM], None]

# -- caches and masks --------------------------------------------------------------------------


def _after_commit(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[HFTarget, int, int, int], None]
) -> None:
    """Calls ``spoil(target, row, accepted, drafted)`` for each row after each commit."""
    score, commit = HFTarget.score, HFTarget.commit

    def scored(self, plan):
        self.__dict__["_drafted"] = plan.tree.size
        return score(self, plan)

    def committed(self, paths):
        commit(self, paths)
        for row, path in enumerate(paths):
            spoil(self, row, len(path), self.__dict__["_drafted"])

    monkeypatch.setattr(HFTarget, "score", scored)
    monkeypatch.setattr(HFTarget, "commit", committed)


def cache_off_by_one(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    def spoil(target, row, accepted, drafted):
        if drafted and accepted == drafted:
            for slots in target.runner.cache.row(row):
                slots[:, target.lengths[row] - 1] = 0

    _after_commit(monkeypatch, spoil)


def not_rolled_back(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    def spoil(target, row, accepted, drafted):
        if accepted < drafted:
            last = target.lengths[row] - 1
            for slots in target.runner.cache.row(row):
                slots[:, last] = slots[:, last + 1]

    _after_commit(monkeypatch, spoil)


def path_not_moved(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    monkeypatch.setattr(SlotCache, "move_path", lambda self, row, start, nodes: None)


def path_moved_early(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """The path is taken from one slot too early where two tokens are pending before the tree."""
    move = SlotCache.move_path
    advance = Runner.advance_paths
    early = 0

    def advance_paths(self, pending, paths):
        nonlocal early
        early = int(pending == 2)
        advance(self, pending, paths)

    monkeypatch.setattr(Runner, "advance_paths", advance_paths)
    monkeypatch.setattr(
        SlotCache,
        "move_path",
        lambda self, row, start, nodes: move(self, row, start - early, nodes),
    )


def last_slot_lost(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """The last slot of a row is lost when it gets more."""
    reserve = SlotCache.reserve

    def reserved(self, first, needed):
        before = [extent.size for extent in self._ranges]
        reserve(self, first, needed)
        for row, size in enumerate(before):
            if size and self._ranges[row].size > size:
                for slots in self.row(row):
                    slots[:, size - 1] = 0

    monkeypatch.setattr(SlotCache, "reserve", reserved)


def rows_keep_their_numbers(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    real = SlotCache.retain
    monkeypatch.setattr(SlotCache, "retain", lambda self, rows: real(self, range(len(rows))))


def siblings_seen(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    def layout(starts, pending, tree, slots):
        blind = replace(tree)
        blind.__dict__["depth"] = tree.depth
        blind.__dict__["ancestors"] = torch.ones_like(tree.ancestors).tril()
        return tree_layout(starts, pending, blind, slots)

    monkeypatch.setattr(running, "tree_layout", layout)


def positions_by_slot(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    def layout(starts, pending, tree, slots):
        right = tree_layout(starts, pending, tree, slots)
        column = torch.arange(right.positions.shape[1])
        return replace(right, positions=starts[:, None] + column)

    monkeypatch.setattr(running, "tree_layout", layout)


def window_in_slots(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    def within(self, window):
        first = self.positions[:, :1]
        slot = first + torch.arange(self.positions.shape[1])
        distance = slot[:, :, None] - torch.arange(self.seen.shape[-1])
        return self.seen & (distance < window)

    monkeypatch.setattr(PassLayout, "within", within)


def shared_streams(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    rows = Batch.rows

    def shared(self, played, plan):
        right = rows(self, played, plan)
        return replace(right, seeds=right.seeds[:1].expand(len(right)))

    monkeypatch.setattr(Batch, "rows", shared)


def reused_draft_stream(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    begin = Chains.__init__

    def by_place(self, rows, counts, random_stream=0):
        begin(self, rows, counts, random_stream)
        places = rows.positions[:, None] + torch.arange(max(counts))
        self._u = uniform(rows.seeds[:, None], places, Role.DRAFT, 1)[..., 0]

    monkeypatch.setattr(Chains, "__init__", by_place)


def one_seed_for_n(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    monkeypatch.setattr(outpace.input_processor, "SEED_STEP", 0)


def noise_by_round(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    gumbel_sample = judging.gumbel_sample

    def by_round(probs, seeds, positions):
        return gumbel_sample(probs, seeds, positions[:, :1].expand_as(positions))

    monkeypatch.setattr(judging, "gumbel_sample", by_round)


def strings_at_block_ends(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """A stop string is looked for at the last token of a block only."""
    extend, found = EngineRequest.extend, EngineRequest._strings_end

    def noting(self, tokens, reported=()):
        self.__dict__["_end_of_block"] = len(self.output_ids) + len(tokens)
        return extend(self, tokens, reported)

    def late(self, begin, count):
        return count == self.__dict__["_end_of_block"] and found(self, begin, count)

    monkeypatch.setattr(EngineRequest, "extend", noting)
    monkeypatch.setattr(EngineRequest, "_strings_end", late)


def beyond_the_end(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    extend = EngineRequest.extend

    def whole(self, tokens, reported=()):
        taken = extend(self, tokens, reported)
        self.output_ids += tokens[taken:]
        return taken

    monkeypatch.setattr(EngineRequest, "extend", whole)


# -- distributions ---------------------------------------------------------------------------------


def padding_not_cut(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    monkeypatch.setattr(llm.engine.batch, "vocabulary", llm.target.config.vocab_size)


def stale_penalties(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    branches = vars(Proposal)["branches"]
    right = getattr(branches, "func", None) or branches.fget  # the second if patched already

    def ignored(proposal):
        branches = right(proposal)
        return Branches(branches.tokens, torch.zeros_like(branches.valid))

    monkeypatch.setattr(Proposal, "branches", property(ignored))


def min_p_ignored(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    init = LogitsPipeline.__init__

    def without(self, *args, **options):
        init(self, *args, **options)
        self._min_p = None

    monkeypatch.setattr(LogitsPipeline, "__init__", without)


def second_best(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """Greedy rows take the second-best token, with speculation and without."""

    def second(self, logits, branches, history):
        return self.process_logits(logits, branches, history).topk(2).indices[..., 1]

    monkeypatch.setattr(LogitsPipeline, "argmax_tokens", second)


def neighbours_history(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """Options that look back see the text of another row, with speculation and without."""
    rows = Batch.rows

    def shifted(self, played, plan):
        right = rows(self, played, plan)
        prompts, outputs = right.history.prompts, right.history.outputs
        other = History([*prompts[1:], prompts[0]], [*outputs[1:], outputs[0]])
        looking = copy.copy(right.pipeline)
        for name in (
            "__call__",
            "argmax_tokens",
            "process_logits",
            "softmax_probs",
            "compute_logprobs",
        ):
            real = getattr(right.pipeline, name)
            looking.__dict__[name] = lambda logits, branches, _, real=real: real(
                logits, branches, other
            )
        return replace(right, pipeline=looking)

    monkeypatch.setattr(Batch, "rows", shifted)


def dead_ends_unseen(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    monkeypatch.setattr(LogitsPipeline, "dead_ends", property(lambda self: {}))


def any_dead_end_ends(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """A text ends if any node of its draft has no distribution, whether the text comes there or
    not."""
    emit = engine.emit

    def ending(played, outcomes, reported, dead_ends):
        emit(played, outcomes, reported, dead_ends)
        for row, nodes in dead_ends.items():
            if not played[row].finished:
                played[row].fail(next(iter(nodes.values())))

    monkeypatch.setattr(engine, "emit", ending)


def next_position(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    def later(self, p, proposal, node):
        return select_node(p, torch.minimum(node + 1, proposal.counts))

    monkeypatch.setattr(TokenRule, "next", later)


def greedy_at_any_temperature(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    def best(self, scores, proposal, rows):
        branches = proposal.branches
        best = rows.pipeline.argmax_tokens(scores.logits, branches, rows.history)
        return accept_matching(best, proposal)

    monkeypatch.setattr(Verifier, "__call__", best)


def unwarped_bonus(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    class Raw(TokenRule):
        def __init__(self, raw):
            self.raw = raw

        def next(self, p, proposal, node):
            warped = TokenRule.next(self, p, proposal, node)
            bonus = (node == proposal.counts)[:, None]
            return torch.where(bonus, select_node(self.raw, node).to(p.dtype), warped)

    def call(self, scores, proposal, rows):
        branches = proposal.branches
        p = rows.pipeline(scores.logits, branches, rows.history)
        raw = scores.logits[..., : p.shape[-1]].softmax(-1)
        verdict = draw_verdict(Raw(raw), p, proposal, rows.seeds, rows.positions)
        return replace(verdict, p=p, rule=self.rule)

    monkeypatch.setattr(Verifier, "__call__", call)


def raw_logprobs(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    def raw(self, logits, branches, history):
        return logits[..., : self.vocabulary].log_softmax(-1)

    monkeypatch.setattr(LogitsPipeline, "compute_logprobs", raw)


# -- drafters ----------------------------------------------------------------------------------


def _repicked(choose: Callable[[Any, Any], Any]) -> Patch:
    """A chain's tokens chosen otherwise than from the q that is handed over."""

    def patch(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
        draw = Chains._draw

        def chosen(self, q):
            token = draw(self, q)
            return choose(q, self._u[:, self.length, None]) if self._sampled else token

        monkeypatch.setattr(Chains, "_draw", chosen)

    return patch


argmax_told_as_sample = _repicked(lambda q, u: q.argmax(-1))
colder_than_told = _repicked(lambda q, u: inverse_cdf(normalize(q**2, q), u))


def unlikely_dropped(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    propose = DraftModel.propose

    def shorter(self, rows, budgets):
        made = propose(self, rows, budgets)
        if not isinstance(made.distribution, Sampled):
            return made
        mass = made.distribution.q.gather(-1, made.tokens[..., None])[..., 0]
        kept = (mass > 0.3).long().cumprod(1).sum(1)
        return replace(made, counts=torch.minimum(made.counts, kept))

    monkeypatch.setattr(DraftModel, "propose", shorter)


def better_of_two(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    propose = DraftModel.propose

    def better(self, rows: Rows, budgets: Any) -> Proposal:
        rows = replace(rows)
        rows.__dict__["all_stop_token_ids"] = ()  # both chains have the same length
        lengths = list(self.runner.lengths)
        one = propose(self, rows, budgets)
        if not isinstance(one.distribution, Sampled):
            return one
        self.runner.lengths = lengths
        other = replace(rows, seeds=rows.seeds + 7777)
        other.__dict__["all_stop_token_ids"] = ()
        two = propose(self, other, budgets)
        scores = [
            made.distribution.q.gather(-1, made.tokens[..., None])[..., 0].prod(1)
            for made in (one, two)
        ]
        second = (scores[1] > scores[0])[:, None]
        tokens = torch.where(second, two.tokens, one.tokens)
        q = torch.where(second[..., None], two.distribution.q, one.distribution.q)
        return replace(one, tokens=tokens, distribution=Sampled(q))

    monkeypatch.setattr(DraftModel, "propose", better)


def told_with_replacement(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    propose = type(llm.engine.drafter).propose

    def flawed(self, rows, budgets):
        made = propose(self, rows, budgets)
        if not isinstance(made.distribution, Sampled):
            return made
        return replace(made, distribution=Sampled(made.distribution.q, with_replacement=True))

    monkeypatch.setattr(type(llm.engine.drafter), "propose", flawed)


def draft_cache_not_rolled_back(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """A drafter that reads rejected tokens for ever proposes badly, and truthfully."""
    since = Rows.since

    def at_least_one(self, row, start):
        return since(self, row, start) or since(self, row, self.lengths[row] - 1)

    monkeypatch.setattr(DraftModel, "observe", lambda self, round: None)
    monkeypatch.setattr(Rows, "since", at_least_one)


def beyond_its_budget(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """One node more than was asked for."""
    propose = DraftModel.propose
    monkeypatch.setattr(
        DraftModel,
        "propose",
        lambda self, rows, budgets: propose(self, rows, [budget + 1 for budget in budgets]),
    )


def beyond_its_context(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """A drafter that goes on where its positions have ended proposes badly, and truthfully."""
    monkeypatch.setattr(llm.engine.drafter.runner, "max_length", 10**6)
