"""Verification of one round: laws of the target, the rule, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outpace.core.law import Branches, History
from outpace.core.proposal import DraftingTerms, Proposal, Sampled, Verdict
from outpace.core.rng import realise
from outpace.draft.base import Rows
from outpace.engine.scoring import Scores
from outpace.targets.hf.fixed import StepRunner
from outpace.verify.base import Rule, draw, walk
from outpace.verify.evidence import Evidence, RuleNeeds
from outpace.verify.lossless.coupled import CoupledRule


def branches_of(proposal: Proposal) -> Branches:
    """Returns the drafted tokens that lead to each node: its ancestors, in order."""
    tree = proposal.tree
    tokens = proposal.tokens[:, None, :].expand(-1, tree.size + 1, -1)
    return Branches(tokens, tree.ancestors[:, :, 1:])


@dataclass(frozen=True)
class Verifier:
    """Turns the target's logits into a verdict with one rule."""

    rule: Rule

    @property
    def coupled(self) -> bool:
        return isinstance(self.rule, CoupledRule)

    @property
    def brief(self) -> DraftingTerms:
        """What the rule asks of the drafter."""
        needs = self.rule.needs
        return DraftingTerms(self.coupled, needs.draft_laws, needs.keeps_drafting)

    def __call__(self, scores: Scores, proposal: Proposal, rows: Rows) -> Verdict:
        """Returns the verdict on a proposal, given what the target's pass says about it."""
        logits, branches = scores.logits, branches_of(proposal)
        if rows.law.all_greedy and self.rule.lossless:
            return walk(rows.law.best(logits, branches, rows.history), proposal)
        p = rows.law(logits, branches, rows.history)
        if self.coupled:
            positions = rows.positions[:, None] + proposal.tree.depth
            return walk(realise(p, rows.seeds, positions), proposal)
        rule = self._informed(scores, proposal, branches, rows)
        return draw(rule, p, proposal, rows.seeds, rows.positions)

    def _informed(self, scores: Scores, proposal: Proposal, branches: Branches, rows: Rows) -> Rule:
        """The rule with the evidence that it asked for; most rules ask for none."""
        needs = self.rule.needs
        if needs == RuleNeeds():
            return self.rule
        soft = second = None
        if needs.soft:
            soft = rows.law.soft(scores.logits, branches, rows.history)
        if scores.second is not None:
            second = rows.law.soft(scores.second, branches, rows.history)
        draft = proposal.soft if needs.draft_laws else None
        return self.rule.given(Evidence(scores.taps, second, soft, draft))


@dataclass(frozen=True)
class Decision:
    """One row's verdict on the host."""

    path: list[int]  # accepted nodes
    accepted: list[int]  # their tokens
    next_token: int
    drafted: int  # nodes proposed
    depth: int  # levels proposed

    @property
    def tokens(self) -> list[int]:
        """What the round would emit if no stop condition cut it."""
        return [*self.accepted, self.next_token]


def decide(
    verifier: Verifier,
    scores: Scores,
    proposal: Proposal,
    rows: Rows,
    player: StepRunner | None = None,
) -> tuple[Verdict, list[Decision]]:
    """Returns the verdict, on the device and row by row: the round's only transfer from there.

    player: plays verdicts that ask the host nothing on their way.
    """
    if player is not None and _is_fixed(verifier, scores, proposal, rows):
        table, node, next_token = _in_one_step(verifier, scores, proposal, rows, player)
        verdict = Verdict(node, next_token)
    else:
        verdict = verifier(scores, proposal, rows)
        table = _table(proposal, verdict)
    listed = table.tolist()
    verdict = replace(verdict, host=[row[0] for row in listed])
    return verdict, [_decision(row, proposal.tree.size) for row in listed]


def _table(proposal: Proposal, verdict: Verdict) -> Tensor:
    """``[B, 4 + 2 N]``: all that the host is told of a round."""
    tree = proposal.tree
    depth = (
        torch.where(proposal.valid, tree.depth[:, 1:], 0).amax(1) if tree.size else proposal.counts
    )
    head = torch.stack([verdict.node, verdict.next_token, proposal.counts, depth], 1)
    return torch.cat([head, verdict.path(tree), proposal.tokens], 1)


def _decision(row: list[int], size: int) -> Decision:
    _, next_token, drafted, depth = row[:4]
    path = [node for node in row[4 : 4 + size] if node > 0]
    tokens = row[4 + size :]
    return Decision(path, [tokens[node - 1] for node in path], next_token, drafted, depth)


def _is_fixed(verifier: Verifier, scores: Scores, proposal: Proposal, rows: Rows) -> bool:
    """Whether the verdict follows from tensors of shapes that come again."""
    plain = verifier.rule.needs == RuleNeeds() and proposal.soft is None
    return plain and verifier.rule.on_device and proposal.tree.is_chain and rows.law.is_fixed


def _in_one_step(
    verifier: Verifier, scores: Scores, proposal: Proposal, rows: Rows, player: StepRunner
) -> tuple[Tensor, ...]:
    """The table, the last nodes and the next tokens of a chain."""
    tree, law, settings = proposal.tree, proposal.law, rows.law.columns

    def step(
        logits: Tensor,
        tokens: Tensor,
        counts: Tensor,
        seeds: Tensor,
        positions: Tensor,
        *further: Tensor,
    ) -> tuple[Tensor, ...]:
        columns, q = further[: len(settings)], further[len(settings) :]
        drawn = replace(law, q=q[0]) if isinstance(law, Sampled) else law
        same = Proposal(tokens, tree, counts, drawn)
        nothing = History([[]] * len(rows), [[]] * len(rows))
        maker = rows.law.over(columns)
        verdict = verifier(Scores(logits), same, Rows(nothing, maker, seeds, positions, rows.brief))
        return _table(same, verdict), verdict.node, verdict.next_token

    sampled = (law.q,) if isinstance(law, Sampled) else ()
    kind = type(law), *(tensor.dtype for tensor in (scores.logits, *sampled))
    key = "verdict", verifier, kind, rows.law.kind, *scores.logits.shape
    given = scores.logits, proposal.tokens, proposal.counts, rows.seeds, rows.positions
    return player.play(key, step, (*given, *settings, *sampled))
