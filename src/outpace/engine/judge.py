"""Verification of one round: laws of the target, the rule, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outpace.core.law import Branches
from outpace.core.proposal import Brief, Proposal, Verdict
from outpace.core.rng import realise
from outpace.draft.base import Rows
from outpace.engine.scoring import Scores
from outpace.verify.base import Rule, draw, walk
from outpace.verify.coupled import CoupledRule
from outpace.verify.evidence import Evidence, RuleNeeds


def branches_of(proposal: Proposal) -> Branches:
    """Returns the drafted tokens that lead to each node: its ancestors, in order."""
    tree = proposal.tree
    tokens = proposal.tokens[:, None, :].expand(-1, tree.size + 1, -1)
    return Branches(tokens, tree.ancestors[:, :, 1:])


@dataclass(frozen=True)
class Judge:
    """Turns the target's logits into a verdict with one rule."""

    rule: Rule

    @property
    def coupled(self) -> bool:
        return isinstance(self.rule, CoupledRule)

    @property
    def brief(self) -> Brief:
        """What the rule asks of the drafter."""
        needs = self.rule.needs
        return Brief(self.coupled, needs.draft_laws, needs.keeps_drafting)

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


def to_host(proposal: Proposal, verdict: Verdict) -> list[Decision]:
    """Returns the verdict row by row: the round's only transfer from the device."""
    tree = proposal.tree
    depth = (
        torch.where(proposal.valid, tree.depth[:, 1:], 0).amax(1) if tree.size else proposal.counts
    )
    head = torch.stack([verdict.next_token, proposal.counts, depth], 1)
    packed = torch.cat([head, verdict.path(tree), proposal.tokens], 1).tolist()
    return [_decision(row, tree.size) for row in packed]


def _decision(row: list[int], size: int) -> Decision:
    next_token, drafted, depth = row[:3]
    path = [node for node in row[3 : 3 + size] if node > 0]
    tokens = row[3 + size :]
    return Decision(path, [tokens[node - 1] for node in path], next_token, drafted, depth)
