"""A rule that is prepared for a round is the rule, with the work of `stop` and `next` done once."""

from __future__ import annotations

import pytest
import torch

from outpace.core.proposal import Proposal, Sampled
from outpace.core.trees.tree import Tree
from outpace.verify.base import DraftSampling, Rule, draw_verdict
from outpace.verify.registry import make_rule, rules

SHARING = [name for name, rule in rules().items() if rule.compute_shared is not Rule.compute_shared]


def round_of(rule: Rule, seed: int) -> tuple[torch.Tensor, Proposal]:
    generator = torch.Generator().manual_seed(seed)
    parents = [0, 0, 1, 2, 2] if rule.trees else [0, 1, 2]
    size = len(parents)
    probs = [torch.randn(2, size + 1, 6, generator=generator).double().softmax(-1) for _ in "pq"]
    q = probs[1][:, parents]
    tokens = q.flatten(0, 1).multinomial(1, generator=generator).view(2, size)
    tree, counts = Tree.uniform(parents, 2), torch.tensor([size, size - 1])
    return probs[0], Proposal(tokens, tree, counts, Sampled(q, DraftSampling.IID in rule.takes))


def test_some_rules_share() -> None:
    assert {"recursive", "block", "traversal"} <= set(SHARING)


@pytest.mark.parametrize("name", SHARING)
def test_the_distributions_are_the_same_and_their_work_is_done_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = make_rule(name)
    compute, calls = type(rule).compute_shared, []
    monkeypatch.setattr(
        type(rule), "compute_shared", lambda *given: calls.append(given) or compute(*given)
    )
    p, proposal = round_of(rule, seed=1)
    node = torch.tensor([1, 0])
    stop, following = rule.stop(p, proposal), rule.next(p, proposal, node)
    assert len(calls) == 2
    ready = rule.prepared(p, proposal)
    assert ready.stop(p, proposal).equal(stop)
    assert ready.next(p, proposal, node).equal(following)
    assert len(calls) == 3
    draw_verdict(rule, p, proposal, torch.arange(2), torch.arange(2))
    assert len(calls) == 4


@pytest.mark.parametrize("name", SHARING)
def test_other_distributions_are_weighed_for_themselves(name: str) -> None:
    rule = make_rule(name)
    (p, proposal), (other_p, other) = round_of(rule, seed=1), round_of(rule, seed=2)
    ready = rule.prepared(p, proposal)
    ready.stop(p, proposal)
    for given in ((other_p, proposal), (p, other), (other_p, other)):
        assert ready.stop(*given).equal(rule.stop(*given))


def test_a_rule_that_shares_nothing_stays_what_it_is() -> None:
    rule = make_rule("token")
    p, proposal = round_of(rule, seed=1)
    assert rule.prepared(p, proposal) is rule
