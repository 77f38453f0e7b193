"""The total variation between a lossy rule's distribution and the target's: measured along a run,
or by a short run of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from outpace.core.params import SamplingParams
from outpace.core.proposal import Deterministic, Proposal, Sampled
from outpace.core.trees.tree import Tree
from outpace.draft.base import Round
from outpace.inputs.prompts import Prompt
from outpace.llm import LLM
from outpace.verify.base import Evidence, Rule

WIDEST = 256
"""Tokens that may be drafted and are written down one by one; the others' mass is reported."""


@dataclass(frozen=True)
class Divergence:
    """Mean total variation between the distribution of the next token under the rule and the
    target's."""

    mean: float
    largest: float
    states: int
    unseen: float
    """Mean draft mass that was not enumerated: the mean is known to within this."""

    @property
    def phrase(self) -> str:
        """In words."""
        within = f" (to within {self.unseen:.3f})" if self.unseen >= 0.0005 else ""
        many = "state" if self.states == 1 else "states"
        return f"mean total variation {self.mean:.3f} per token over {self.states} {many}{within}"


@dataclass
class Watch:
    """Collects the total variation at the rounds that it sees, up to ``limit`` rows."""

    limit: int = 64
    found: list[float] = field(default_factory=list)
    unseen: list[float] = field(default_factory=list)
    blocked: bool = False
    """Whether a draft was met that cannot be measured."""

    def see(self, round: Round) -> None:
        """Asks the rule, at every root, what it would do with every token that might have been
        drafted there."""
        probs, rule, proposal = round.verdict.p, round.verdict.rule, round.proposal
        if probs is None:
            return
        for row, outcome in enumerate(round.outcomes):
            if len(self.found) >= self.limit or not outcome.drafted:
                continue
            if _peeks(rule) and isinstance(proposal.distribution, Sampled):
                self.blocked = True
                continue
            variation, unseen = one_step(rule, probs[row], proposal, row)
            self.found.append(variation)
            self.unseen.append(unseen)

    def divergence(self) -> Divergence | None:
        """Returns what was found, None if no round drafted anything."""
        if not self.found:
            return None
        return Divergence(fmean(self.found), max(self.found), len(self.found), fmean(self.unseen))


@contextmanager
def watching(llm: LLM, limit: int = 64) -> Iterator[Watch]:
    """Measures the rule of an engine while it generates inside; the texts do not change."""
    watch = Watch(limit)
    with llm.engine.observing(watch.see):
        yield watch


def _peeks(rule: Rule) -> bool:
    """Whether the rule knows something about a drafted token that it would not know about others
    that might have been drawn instead."""
    return bool(rule.needs.hidden_layers) or rule.needs.second_copy_prompt is not None


def one_step(rule: Rule, p: Tensor, proposal: Proposal, row: int) -> tuple[float, float]:
    """Returns the total variation between the distribution of the next token and p, if one token is
    drafted, and the draft mass that was left out.

    p: ``[M, V]`` of the row. Every token x that may be drafted is weighed with q(x):
    distribution(y) = sum_x q(x) (pass(x) [y = x] + stop(x) next(y | x)).
    """
    tokens, weights, q = _candidates(proposal, row)
    count = tokens.shape[0]
    device = p.device
    # The distributions after x are not known for tokens other than the drafted one, and do not
    # matter for the first token: the same distribution stands at the root and after.
    probs = torch.stack([p[0], p[0]]).expand(count, -1, -1)
    distribution = Deterministic() if q is None else Sampled(q.expand(count, 1, -1))
    counts = torch.ones(count, dtype=torch.long, device=device)
    single = Proposal(tokens[:, None], Tree.chain(count, 1, device), counts, distribution)
    informed = _informed(rule, row, count)
    stop = informed.stop(probs, single)[:, 0].double()
    root = torch.zeros(count, dtype=torch.long, device=device)
    extra = informed.next(probs, single, root).double()
    weights = weights.double()
    mixed = ((weights * stop)[:, None] * extra).sum(0)
    mixed.index_add_(0, tokens, weights * (1 - stop))
    unseen = 1 - float(weights.sum())
    mixed = mixed / weights.sum()
    return 0.5 * float((mixed - p[0].double()).abs().sum()), max(0.0, unseen)


def _candidates(proposal: Proposal, row: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens that could stand first, their probabilities, and the distribution they are drawn
    from."""
    if isinstance(proposal.distribution, Deterministic):
        token = proposal.tokens[row, :1]
        return token, torch.ones(1, dtype=torch.float64, device=token.device), None
    q = proposal.distribution.q[row, 0]
    top = torch.topk(q, min(WIDEST, q.shape[-1]))
    kept = top.values > 0
    return top.indices[kept], top.values[kept], q


def _informed(rule: Rule, row: int, count: int) -> Rule:
    """The rule with the evidence of one row, at the root and one token."""
    known = {f.name: getattr(rule.evidence, f.name) for f in fields(rule.evidence)}
    if all(value is None for value in known.values()):
        return rule
    short = {"draft_probs": 1}
    cut = {
        name: None if value is None else value[row, : short.get(name, 2)].expand(count, -1, -1)
        for name, value in known.items()
    }
    return rule.with_evidence(Evidence(**cut))


# -- a short run on given prompts, watched -----------------------------------------------------


TEXTS = 4
TOKENS = 64
"""Tokens of all texts together."""
CHAIN = 5
"""Tokens of a draft where the engine chooses how many."""


@dataclass(frozen=True)
class Replay:
    """What a lossy rule did to the distribution, or why that is not known."""

    rule: str
    divergence: Divergence | None
    blocked: bool = False
    """Whether something was drafted that could not be measured."""

    @property
    def sentence(self) -> str:
        """What is to be said with the speed."""
        if self.divergence is not None:
            return f"verify={self.rule} is lossy: {self.divergence.phrase}"
        if self.blocked:
            return (
                f"verify={self.rule} is lossy, by how much is not known: what it looks at is only "
                "computed for tokens that were drafted, and these were drawn (greedy texts can be "
                "measured)"
            )
        return f"verify={self.rule} is lossy, but nothing was drafted: nothing was changed"

    def as_dict(self) -> dict[str, Any]:
        """Returns the object that ``--json`` shows."""
        found = {"unmeasured": self.sentence} if self.divergence is None else {}
        known = {} if self.divergence is None else asdict(self.divergence)
        return {"rule": self.rule, **known, **found}


def replay(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams) -> Replay | None:
    """Returns what the engine's rule does to the distribution of the first `TEXTS` prompts, under
    the same options and seed; None for a lossless rule, at no cost. Where the engine chooses how
    much is drafted, the same number is drafted in all of these rounds.
    """
    rule = llm.engine.verifier.rule
    if rule.lossless:
        return None
    listed = list(prompts[:TEXTS])
    limit = max(1, TOKENS // len(listed))
    wanted = llm.resolve(params).max_tokens or limit
    count = llm.config.num_speculative_tokens
    if count == "auto":
        shape = llm.engine.drafter.shape
        count = CHAIN if shape is None else shape.size
    few = params.shortened(min(limit, wanted))
    short = replace(few, n=1, logprobs=None, speculative=count)
    with watching(llm) as watch:
        llm.generate(listed, short)
    return Replay(rule.name, watch.divergence(), blocked=watch.blocked)
