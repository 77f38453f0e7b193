"""Verification of one round: the distributions of the target, the rule, the verdict, and
log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NoReturn

import torch
from torch import Tensor

from outpace.core.gumbel import gumbel_sample
from outpace.core.logits_pipeline import Branches
from outpace.core.proposal import AuxTokens, DraftingTerms, DraftSampling, Proposal, Verdict
from outpace.core.transfer import to_device
from outpace.draft.base import Drafter
from outpace.draft.round import Outcome, Rows
from outpace.engine.request import EngineRequest, Logprob
from outpace.errors import ConfigError
from outpace.targets.base import Scores
from outpace.verify.base import (
    NO_NEEDS,
    Evidence,
    Rule,
    RuleNeeds,
    accept_matching,
    draw_verdict,
)


@dataclass(frozen=True)
class Verifier:
    """Turns the target's scores into a verdict with one rule.

    second_copy_token_ids: stand between the two copies of the draft, for a rule that has the draft
    scored twice.
    """

    rule: Rule
    second_copy_token_ids: Sequence[int] = ()

    @property
    def coupled(self) -> bool:
        """Whether tokens are drawn with noise that depends on the request's seed and the token's
        position only."""
        return self.rule.coupled

    @cached_property
    def terms(self) -> DraftingTerms:
        """What the rule asks of the drafter."""
        return DraftingTerms(self.coupled, self._needs.draft_probs, self._needs.continue_on_probs)

    @cached_property
    def _needs(self) -> RuleNeeds:
        return self.rule.needs

    @property
    def hidden_layers(self) -> frozenset[int]:
        """The layers whose hidden states the rule looks at."""
        return frozenset(self._needs.hidden_layers)

    def aux_tokens(self, proposal: Proposal) -> AuxTokens | None:
        """Returns what has to be scored besides the draft: the drafter's own columns and, for a
        rule that wants it, the second copy of the draft after the text."""
        if self._needs.second_copy_prompt is None:
            return proposal.aux_tokens
        if proposal.aux_tokens is not None:
            self._refuse_aux_tokens()
        return _second_copy(proposal, self.second_copy_token_ids)

    def check(self, drafter: Drafter) -> None:
        """Raises ``ConfigError`` where the rule cannot verify what a drafter proposes."""
        for drawn in [DraftSampling.DETERMINISTIC] if self.coupled else drafter.sampling_kinds:
            self.rule.check(drawn, drafter.trees)
        if drafter.capabilities.uses_aux_tokens and self._needs.second_copy_prompt is not None:
            self._refuse_aux_tokens()

    def _refuse_aux_tokens(self) -> NoReturn:
        raise ConfigError(
            f"verify={self.rule.name!r} has the draft scored twice, which does not go with a "
            "drafter that feeds columns of its own: choose another rule or drafter."
        )

    def __call__(self, scores: Scores, proposal: Proposal, rows: Rows) -> Verdict:
        """Returns the verdict on a proposal, given what the target's pass says about it."""
        logits, branches = scores.logits, proposal.branches
        # Greedy rows: the target's token at each node is its argmax.
        if rows.pipeline.all_greedy and self.rule.lossless:
            best = rows.pipeline.argmax_tokens(logits, branches, rows.history)
            return accept_matching(best, proposal)
        p = rows.pipeline(logits, branches, rows.history)
        if self.coupled:  # it is drawn with noise that the drafter used, too
            positions = rows.positions[:, None] + proposal.tree.depth
            return accept_matching(gumbel_sample(p, rows.seeds, positions), proposal)
        # Sampled rows: the rule says where to stop, and what is drawn there.
        rule = self._informed(scores, proposal, branches, rows)
        allowed = self._allowed(p, scores, proposal, rows)
        verdict = draw_verdict(rule, p, proposal, rows.seeds, rows.positions, allowed)
        return replace(verdict, p=p, rule=rule)

    def _allowed(self, p: Tensor, scores: Scores, proposal: Proposal, rows: Rows) -> Tensor | None:
        """``[B, M, V]``, above 0 for the tokens to which the request's options leave a probability.
        None for lossless rules, which accept and draw no others by themselves."""
        if self.rule.lossless or not proposal.tree.size:
            return None
        if rows.pipeline.any_greedy:  # their p is 1 at the argmax, and a lossy rule may accept more
            return rows.pipeline.softmax_probs(scores.logits, proposal.branches, rows.history)
        return p

    def _informed(self, scores: Scores, proposal: Proposal, branches: Branches, rows: Rows) -> Rule:
        """The rule with the evidence that it asked for; most rules ask for none."""
        needs = self._needs
        if needs == NO_NEEDS:
            return self.rule
        softmax_probs = second = None
        if needs.softmax_probs:
            softmax_probs = rows.pipeline.softmax_probs(scores.logits, branches, rows.history)
        if needs.second_copy_prompt is not None and scores.aux_logits is not None:
            copy = scores.aux_logits[:, -(1 + proposal.tree.size) :]
            second = rows.pipeline.softmax_probs(copy, branches, rows.history)
        states = scores.node_hidden_states(needs.hidden_layers) if needs.hidden_layers else None
        draft = proposal.draft_probs if needs.draft_probs else None
        return self.rule.with_evidence(Evidence(states, second, softmax_probs, draft))


def _second_copy(proposal: Proposal, text: Sequence[int]) -> AuxTokens:
    """The text after each row's last valid node, then the draft again; the last token of the text
    stands for the root."""
    rows, size = proposal.tokens.shape
    device = proposal.tokens.device
    between = to_device(list(text), device).expand(rows, -1)
    last = size + len(text)
    following = torch.arange(size + 1, last, device=device).expand(rows, -1)
    parents = torch.cat([proposal.counts[:, None], following, proposal.tree.parents + last], 1)
    return AuxTokens(parents, tokens=torch.cat([between, proposal.tokens], 1))


def to_host(
    verdict: Verdict, proposal: Proposal, method: str, unread: Tensor | None = None
) -> tuple[Verdict, list[Outcome], bool]:
    """Returns the verdict with `node_on_host` set, what came of each row, and what ``unread`` says.
    This is the round's only transfer from the device.

    method: the drafter's name for rows where the proposal gives none. unread: a bool that is still
    on the device (`LogitsPipeline.unread_dead_ends`); None stands for true.
    """
    tree, rows = proposal.tree, len(proposal.counts)
    methods = proposal.methods or [method] * rows
    predicted = proposal.predicted or [False] * rows
    flag = [] if unread is None else [unread.expand(rows, 1)]
    if not tree.size:  # plain decoding
        host_rows = torch.cat([verdict.next_token[:, None], *flag], 1).tolist()
        outcomes = [
            Outcome(0, 0, method=name, tokens=row[:1])
            for name, row in zip(methods, host_rows, strict=True)
        ]
        return (
            replace(verdict, node_on_host=[0] * rows),
            outcomes,
            unread is None or bool(host_rows[0][-1]),
        )
    depth = torch.where(proposal.valid, tree.depth[:, 1:], 0).amax(1)
    numbers = torch.stack([verdict.node, verdict.next_token, proposal.counts, depth], 1)
    host_rows = torch.cat([numbers, verdict.path(tree), proposal.tokens, *flag], 1).tolist()
    outcomes = [
        _outcome(row, tree.size, name, from_prediction)
        for row, name, from_prediction in zip(host_rows, methods, predicted, strict=True)
    ]
    verdict = replace(verdict, node_on_host=[row[0] for row in host_rows])
    return verdict, outcomes, unread is None or bool(host_rows[0][-1])


def _outcome(row: list[int], size: int, method: str, predicted: bool) -> Outcome:
    """A row's outcome. row: node, next token, drafted, depth, ``size`` of a path, ``size`` drafted
    tokens."""
    _, next_token, drafted, depth = row[:4]
    path = [node for node in row[4 : 4 + size] if node > 0]
    draft = row[4 + size : 4 + 2 * size]
    tokens = [*(draft[node - 1] for node in path), next_token]
    return Outcome(drafted, depth, path=path, method=method, tokens=tokens, predicted=predicted)


def logprobs_of(
    logits: Tensor,
    proposal: Proposal,
    rows: Rows,
    requests: Sequence[EngineRequest],
    outcomes: Sequence[Outcome],
) -> list[list[dict[int, Logprob]]]:
    """Returns, per row and committed token, its log-probability and those of the most probable.

    Empty for rows that did not ask. A token's distribution is that of the node it follows.
    """
    if all(request.params.logprobs is None for request in requests):
        return [[] for _ in requests]
    table = rows.pipeline.compute_logprobs(logits, proposal.branches, rows.history)  # [B, M, V]
    found: list[list[dict[int, Logprob]]] = []
    for row, (request, outcome) in enumerate(zip(requests, outcomes, strict=True)):
        count = request.params.logprobs
        if count is None:
            found.append([])
            continue
        nodes = [0, *outcome.path]
        logprobs = table[row, nodes]  # [emitted, V]
        pairs = zip(logprobs, outcome.tokens, strict=True)
        found.append([_entry(own, token, count) for own, token in pairs])
    return found


def _entry(logprobs: Tensor, token: int, count: int) -> dict[int, Logprob]:
    value = logprobs[token]
    rank = int((logprobs > value).sum()) + 1
    entry = {token: Logprob(float(value), rank)}
    top = torch.topk(logprobs, min(count, logprobs.shape[-1]))
    ranked = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    for place, (other, logprob) in enumerate(ranked, 1):
        entry.setdefault(other, Logprob(logprob, place))
    return entry
