"""The distribution gate: the joint distribution of the tokens that a rule emits, by enumeration.

For tiny models every possible proposal is listed with its probability. All of them go through the
rule's own `stop` and `next` in one ragged batch, and the distribution of the emitted tokens, summed
over all proposals, is compared with the target's joint distribution of the next tokens. Nothing is
sampled, so there are no false alarms: an exact rule differs by rounding, about 1e-15.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor

from outpace.audit.gate.drafting import BUILT_IN, ENDING, Drafting, Drafts, of_siblings
from outpace.audit.gate.gate_trees import FAST, FULL, GateTree
from outpace.audit.gate.oracle import best_acceptance, best_of_several, deterministic_acceptance
from outpace.audit.gate.world import World, make_world, with_small_numbers
from outpace.core.proposal import Deterministic, DraftSampling, Proposal, Sampled
from outpace.core.trees.tree import Tree
from outpace.errors import ConfigError, IncompatibleRule, did_you_mean
from outpace.heads.classifiers import JudgeHead
from outpace.verify.base import Evidence, Rule
from outpace.verify.lossy import JudgeRule
from outpace.verify.registry import make_rule, rules

TOLERANCE = 1e-12
"""Largest total variation from the target's distribution that a lossless rule may have."""

ROUNDED = 1e-6
"""By how much what a lossy rule returns may miss being a distribution: it may compute in
float32."""


@dataclass(frozen=True)
class DistributionRow:
    """What was found about one rule with one way of drafting on one tree."""

    rule: str
    lossless: bool
    drafted: str
    shape: str
    pairs: int
    worst_tv: float
    """Largest total variation from the target's joint distribution, over all model pairs and draft
    lengths; infinite where `stop` or `next` returned what is no distribution, such as a negative
    probability. Of a lossless rule also over further pairs, with probabilities as small as float32
    has them."""
    mean_tv: float
    accepted: float
    """Mean number of accepted tokens when the whole tree is drafted."""
    one_step: float
    """Mean probability that one of the root's children is accepted."""
    optimum: float
    """Largest ``one_step`` that any exact rule can have."""
    fault: str = ""
    """What `stop` or `next` returned that has not even the shape of a distribution."""

    @property
    def gap(self) -> float:
        """How far ``one_step`` is below the optimum; negative only for lossy rules."""
        return self.optimum - self.one_step

    @property
    def passed(self) -> bool:
        """Whether a lossless rule is exact; a lossy one passes with any distribution that is a
        number."""
        return self.worst_tv <= TOLERANCE or (not self.lossless and math.isfinite(self.worst_tv))


@dataclass(frozen=True)
class DistributionReport:
    """What the gate found, a row for each rule, way of drafting and tree."""

    seed: int
    rows: tuple[DistributionRow, ...] = field(default=())
    tolerance: float = TOLERANCE

    @property
    def failures(self) -> tuple[DistributionRow, ...]:
        return tuple(row for row in self.rows if not row.passed)

    @property
    def passed(self) -> bool:
        return not self.failures

    def as_dict(self) -> dict[str, object]:
        """Returns plain numbers and strings, for JSON."""
        rows = [{**asdict(row), "gap": row.gap, "passed": row.passed} for row in self.rows]
        return {
            "seed": self.seed,
            "tolerance": self.tolerance,
            "passed": self.passed,
            "rows": rows,
        }


def audit_distributions(
    rules: Iterable[Rule | str] | None = None,
    drafters: Iterable[str] | dict[str, Drafting] | None = None,
    fast: bool = True,
    seed: int = 0,
    shapes: Sequence[GateTree] | None = None,
    pairs: int | None = None,
) -> DistributionReport:
    """Returns the report of these rules (unset: all), each with every way of drafting it takes.

    drafters: names in `drafting.BUILT_IN`, or functions of your own by name. fast: fewer trees and
    model pairs. shapes, pairs: the trees and the number of model pairs, in place of those of
    ``fast``. A way of drafting that a rule refuses is left out; raises ``IncompatibleRule`` if
    nothing is left, ``ConfigError`` for an unknown name, or where there was nothing to begin with:
    what was not enumerated has not passed.
    """
    ways, chosen = _ways(drafters), _rules(rules)
    worlds: dict[tuple[int, int, int], tuple[World, World]] = {}
    shapes = shapes or (FAST if fast else FULL)
    pairs = pairs or (10 if fast else 20)
    rows = []
    refusal: IncompatibleRule | None = None
    for shape in shapes:
        key = (min(pairs, shape.most_pairs or pairs), shape.vocabulary, shape.depth)
        if key not in worlds:
            few = make_world(max(1, key[0] // 2), *key[1:], seed=seed)
            worlds[key] = make_world(*key, seed=seed), with_small_numbers(few, seed)
        world, small = worlds[key]
        for name, way in ways.items():
            if way in ENDING and (not shape.is_chain or shape.depth < 2):
                continue
            drafts, of_small = (way(each, list(shape.parents)) for each in (world, small))
            for rule in chosen:
                try:
                    rule.check(DraftSampling.by(drafts.distribution), tree=not shape.is_chain)
                except IncompatibleRule as error:
                    refusal = error
                    continue
                row = audit_one(rule, world, drafts, shape, name)
                if rule.lossless:
                    worst = float(measure(rule, small, of_small, shape).distance.max())
                    row = replace(row, worst_tv=max(row.worst_tv, worst))
                rows.append(row)
    if not rows:
        raise refusal or ConfigError(
            "there is nothing to enumerate: name a rule, a way of drafting and a tree. Those that "
            "end chains themselves need a chain of two or more."
        )
    order = [rule.name for rule in chosen]
    rows.sort(key=lambda row: order.index(row.rule))
    return DistributionReport(seed, tuple(rows))


def audit_one(
    rule: Rule, world: World, drafts: Drafts, shape: GateTree, drafted: str
) -> DistributionRow:
    """Returns the report's row for one rule with one set of drafts on one tree."""
    found = measure(rule, world, drafts, shape)
    return DistributionRow(
        rule=rule.name,
        lossless=rule.lossless,
        drafted=drafted,
        shape=shape.name,
        pairs=world.pairs,
        worst_tv=float(found.distance.max()),
        mean_tv=float(found.distance.mean()),
        accepted=float(found.accepted[-1].mean()),
        one_step=float(found.one_step[-1].mean()),
        optimum=float(found.optimum.mean()),
        fault=found.fault,
    )


@dataclass(frozen=True, eq=False)
class Measured:
    """What a rule does with each of G pairs of models, by the number of drafted nodes."""

    distance: Tensor  # [counts, R or 1, G], total variation of the joint distribution; R proposals.
    # Infinite where the rule returned what is no distribution.
    accepted: Tensor  # [counts, G], mean number of accepted tokens
    one_step: Tensor  # [counts, G], chance that a child of the root is accepted
    optimum: Tensor  # [G], the largest one_step of any rule, all nodes drafted
    fault: str = ""  # what has not the shape of a distribution


def measure(rule: Rule, world: World, drafts: Drafts, shape: GateTree) -> Measured:
    """Returns the numbers that a row of the report sums up."""
    case = _Case(rule, world, drafts, shape)
    joint = world.complete(case.emitted())  # [counts, proposals or 1, G, V^L]
    distance = (joint - world.target()).abs().sum(-1) / 2
    return Measured(
        distance=distance.masked_fill(case.impossible(), float("inf")),
        accepted=case.mean(case.depth),
        one_step=case.mean((case.depth > 0).double()),
        optimum=case.optimum(),
        fault=case.fault,
    )


class _Case:
    """A ragged batch with a row for each draft length, pair of models and proposal.

    The nodes beyond a row's draft length hold arbitrary values, on which no rule may depend.
    """

    def __init__(self, rule: Rule, world: World, drafts: Drafts, shape: GateTree) -> None:
        self.world, self.drafts, self.shape = world, drafts, shape
        parents, nodes = list(shape.parents), len(shape.parents)
        # All draft lengths; for large trees half of the nodes, all but one, and all.
        some = range(nodes + 1) if nodes < 5 else (nodes // 2, nodes - 1, nodes)
        sweep = [nodes] if drafts.counts is not None else list(some)
        self.sets, proposals = len(sweep), len(drafts.tokens)
        size = (self.sets, world.pairs, proposals)
        counts = torch.tensor(sweep)[:, None, None].expand(size)
        if drafts.counts is not None:
            counts = drafts.counts.expand(size)
        self.counts = counts.flatten()  # [B]
        context = world.contexts(drafts.tokens, parents)  # [R, M]
        self.context = context.repeat(self.sets * world.pairs, 1)  # [B, M]
        pair = torch.arange(world.pairs)[:, None].expand(size[1:]).flatten().repeat(self.sets)
        used = torch.arange(nodes + 1) <= self.counts[:, None]  # [B, M]
        # Nodes beyond the draft length get other contexts' distributions and other tokens.
        seen = torch.where(used, self.context, (self.context + 1) % world.p.shape[1])
        tokens = drafts.tokens.repeat(self.sets * world.pairs, 1)
        tokens = torch.where(used[:, 1:], tokens, (tokens + 1) % world.vocabulary)
        distribution, draft = drafts.distribution, world.q[pair[:, None], self.context[:, parents]]
        if isinstance(distribution, Sampled):
            q = distribution.q.repeat(self.sets, 1, 1).where(used[:, 1:, None], draft.roll(1, -1))
            distribution = replace(distribution, q=q)
        tree = Tree.uniform(parents, len(tokens))
        self.proposal = Proposal(tokens, tree, self.counts, distribution)
        self.p = world.p[pair[:, None], seen]
        self.pair, self.depth = pair, tree.depth.double()
        self.rule = rule.with_evidence(
            Evidence(
                hidden_states=world.states[pair[:, None], seen],
                second_copy_probs=world.second[pair[:, None], seen],
                softmax_probs=None,
                draft_probs=draft,
            )
        )
        self.chance = drafts.chance.expand(self.sets, -1, -1)  # [counts, G, R]
        self.fault = ""
        stop = self._shaped("stop", self.rule.stop(self.p, self.proposal), self.p.shape[1])
        # A rule may answer anything for a proposal that cannot happen.
        happens = self.chance.flatten() > 0
        self.stop = torch.where(happens[:, None], stop, 0.0)
        self._impossible = happens & ~self._is_distribution(stop)  # [B]

    def _shaped(self, function: str, found: Tensor, width: int) -> Tensor:
        """Returns what a function of the rule returned, ``[B, width]``; zeros, which are no
        distribution, in place of what has another shape, which is noted."""
        shape = (len(self.p), width)
        if tuple(found.shape) == shape:
            return found.double()
        self.fault = self.fault or (
            f"`{function}` returns the shape {list(found.shape)} where {list(shape)} is asked for"
        )
        return torch.zeros(shape, dtype=torch.float64)

    def _is_distribution(self, probs: Tensor) -> Tensor:
        """Returns ``[B]`` bool: whether these are probabilities that sum to 1. probs: ``[B, n]``.

        Sums over proposals do not tell: what a rule takes off below 0 in one it may put on in
        another, and no token can be drawn so.
        """
        slack = TOLERANCE if self.rule.lossless else ROUNDED
        return (probs >= -slack).all(-1) & ((probs.sum(-1) - 1).abs() <= slack)

    def impossible(self) -> Tensor:
        """Returns ``[counts, 1, G]`` bool: where some `stop` or `next` was no distribution, once
        `emitted` has asked for all of them."""
        impossible = self._impossible | bool(self.fault)
        return impossible.view(self.chance.shape).any(-1)[:, None]

    def emitted(self) -> Tensor:
        """Returns ``[counts, R or 1, G, C V + 1]``: the probability of each emitted text, summed
        over proposals unless each of them must be exact by itself (`Drafts.each`)."""
        world, rows = self.world, len(self.pair)
        apart = len(self.drafts.tokens) if self.drafts.each else 1
        size = self.p.shape[-1] * world.p.shape[1] + 1
        mass = torch.zeros(self.sets * apart * world.pairs * size, dtype=torch.float64)
        row = torch.arange(rows)
        counted = row // (world.pairs * len(self.drafts.tokens))
        proposal = row % len(self.drafts.tokens) if self.drafts.each else torch.zeros_like(row)
        start = ((counted * apart + proposal) * world.pairs + self.pair) * size  # [B]
        chance = self.chance.flatten()
        for node in range(self.stop.shape[1]):
            at = torch.full_like(self.counts, node).clamp(max=self.counts)
            distribution = self.rule.next(self.p, self.proposal, at)
            distribution = self._shaped("next", distribution, self.p.shape[-1])  # [B, V]
            weight = chance * self.stop[:, node] * (node <= self.counts)
            asked = weight != 0
            self._impossible |= asked & ~self._is_distribution(distribution)
            distribution = torch.where(asked[:, None], distribution, 0.0)
            first = start + self.context[:, node] * world.vocabulary + 1
            index = first[:, None] + torch.arange(world.vocabulary)
            mass.index_add_(0, index.flatten(), (weight[:, None] * distribution).flatten())
        return mass.view(self.sets, apart, world.pairs, size)

    def mean(self, value: Tensor) -> Tensor:
        """Returns ``[counts, G]``: the mean value ``[B, M]`` of the node where a rule stops."""
        found = (self.stop * value).sum(-1).view(self.chance.shape)
        return (found * self.chance).sum(-1) / self.chance.sum(-1)

    def optimum(self) -> Tensor:
        """Returns ``[G]``: the largest chance that any exact rule accepts a child of the root."""
        distribution, root = (
            self.drafts.distribution,
            [i for i, up in enumerate(self.shape.parents) if up == 0],
        )
        p, q = self.world.p[:, 0], self.world.q[:, 0]
        if isinstance(distribution, Deterministic):
            offered = self.drafts.tokens[:, root].expand(self.world.pairs, -1, -1)
            each = deterministic_acceptance(p[:, None].expand(*offered.shape[:2], -1), offered)
            return each.mean(-1)
        if distribution.per_drafter:
            return best_of_several(p, of_siblings(q, len(root)))
        return best_acceptance(p, q, len(root), replacement=distribution.with_replacement)


def _ways(drafters: Iterable[str] | dict[str, Drafting] | None) -> dict[str, Drafting]:
    if isinstance(drafters, dict):
        return drafters
    names = list(BUILT_IN if drafters is None else drafters)
    for name in names:
        if name not in BUILT_IN:
            raise ConfigError(f"unknown way of drafting {name!r}{did_you_mean(name, BUILT_IN)}.")
    return {name: BUILT_IN[name] for name in names}


def _rules(chosen: Iterable[Rule | str] | None) -> list[Rule]:
    every = list(rules()) if chosen is None else list(chosen)
    return [_named(rule) if isinstance(rule, str) else _made(rule) for rule in every]


def _made(rule: object) -> Rule:
    if isinstance(rule, type) and issubclass(rule, Rule):
        name = rule.__name__
        raise ConfigError(f"{name} is a class, not a rule: give an object of it, such as {name}().")
    if not isinstance(rule, Rule):
        raise ConfigError(f"a rule is the name of one or an object of one, not {rule!r}.")
    return rule


def _named(name: str) -> Rule:
    """The rule with its default options; a judge, whose head has no default, with some head."""
    if name == JudgeRule.name:
        return JudgeRule(head=JudgeHead(torch.tensor([1.0, -0.5, 0.25, 0.0]), bias=-0.5))
    return make_rule(name)
