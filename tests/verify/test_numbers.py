"""Rules in float32, on what real models produce: peaks, zeros, ties, padding, nothing drafted."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outpace.core.proposal import Deterministic, Proposal, Sampled
from outpace.core.trees.tree import Tree
from outpace.heads.classifiers import JudgeHead
from outpace.verify.base import (
    DraftSampling,
    Evidence,
    Rule,
    accept_matching,
    draw_verdict,
)
from outpace.verify.registry import make_rule, rules

KINDS = ["soft", "sharp", "one-hot", "flat", "tiny", "disjoint", "equal"]
TREES = [[], [0], [0, 1, 2], [0, 0, 0], [0, 0, 1, 1, 2], [0, 1, 0, 3], [0, 0, 1, 2, 4]]


def probs(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """p and q in float32, as a softmax makes them."""
    a, b = (torch.randn(shape, generator=generator) for _ in range(2))
    if kind == "sharp":
        a, b = 30 * a, 30 * b
    if kind == "tiny":
        b = 60 * b
    p, q = a.softmax(-1), b.softmax(-1)
    if kind == "one-hot":
        p = torch.nn.functional.one_hot(a.argmax(-1), shape[-1]).float()
    if kind == "flat":
        p, q = torch.full(shape, 1 / shape[-1]), torch.full(shape, 1 / shape[-1])
    if kind == "disjoint":
        low = torch.arange(shape[-1]) < shape[-1] // 2
        p, q = (
            (a.masked_fill(~low, -torch.inf)).softmax(-1),
            b.masked_fill(low, -torch.inf).softmax(-1),
        )
    return p, p if kind == "equal" else q


def proposals(
    rule: Rule, kind: str, parents: list[int], vocabulary: int, seed: int
) -> Iterator[tuple[Tensor, Proposal]]:
    """Three rows, drafted in each way that the rule takes, with ragged counts."""
    generator = torch.Generator().manual_seed(seed)
    rows, nodes = 3, len(parents)
    p, q = probs(kind, (rows, nodes + 1, vocabulary), generator)
    q = q[:, parents] if nodes else q[:, :0]
    counts = torch.tensor([nodes, nodes // 2, 0])
    tree = Tree.uniform(parents, rows)
    for drawn in sorted(rule.takes, key=str):
        tokens = torch.zeros(rows, nodes, dtype=torch.long)
        left = q.clone()
        for node, parent in enumerate(parents):
            distribution = torch.where(
                left[:, node].sum(-1, keepdim=True) > 0, left[:, node], q[:, node]
            )
            tokens[:, node] = distribution.multinomial(1, generator=generator)[:, 0]
            if drawn is DraftSampling.WITHOUT_REPLACEMENT:
                for other in range(node + 1, nodes):
                    if parents[other] == parent:
                        left[torch.arange(rows), other, tokens[:, node]] = 0
        distribution = (
            Deterministic()
            if drawn is DraftSampling.DETERMINISTIC
            else Sampled(q, drawn is DraftSampling.IID)
        )
        yield p, Proposal(tokens, tree, counts, distribution)


def make(name: str, p: Tensor) -> Rule:
    head = {"head": JudgeHead(torch.ones(3))} if name == "judge" else {}
    rule = make_rule(name, **head)
    return rule.with_evidence(
        Evidence(hidden_states=torch.randn(*p.shape[:2], 3), second_copy_probs=p.flip(-1))
    )


@pytest.mark.parametrize("name", list(rules()))
@settings(max_examples=12)
@given(
    kind=st.sampled_from(KINDS),
    parents=st.sampled_from(TREES),
    vocabulary=st.integers(2, 9),
    seed=st.integers(0, 10_000),
)
def test_any_float32_input_gives_distributions(
    name: str, kind: str, parents: list[int], vocabulary: int, seed: int
) -> None:
    kind_of = rules()[name]
    if not kind_of.trees and parents != list(range(len(parents))):
        parents = parents[:1]
    dummy = make(name, torch.zeros(1, 1, 1))
    for p, proposal in proposals(dummy, kind, parents, vocabulary, seed):
        rule = make(name, p)
        stop = rule.stop(p, proposal)
        assert torch.isfinite(stop).all()
        assert (stop >= 0).all()
        assert torch.allclose(stop.double().sum(-1), torch.ones(3).double(), atol=2e-5)
        nodes = torch.arange(stop.shape[1])
        assert (stop[nodes > proposal.counts[:, None]] == 0).all()
        for node in range(stop.shape[1]):
            at = torch.full((3,), node).clamp(max=proposal.counts)
            distribution = rule.next(p, proposal, at)
            assert torch.isfinite(distribution).all()
            assert (distribution >= 0).all()
            assert torch.allclose(distribution.double().sum(-1), torch.ones(3).double(), atol=2e-5)


@pytest.mark.parametrize("name", list(rules()))
@pytest.mark.parametrize("kind", ["soft", "one-hot", "disjoint"])
def test_what_is_drawn_has_positive_mass(name: str, kind: str) -> None:
    parents = [0, 0, 1, 2] if rules()[name].trees else [0, 1, 2]
    dummy = make(name, torch.zeros(1, 1, 1))
    for p, proposal in proposals(dummy, kind, parents, 5, seed=1):
        rule = make(name, p)
        for position in range(8):
            verdict = draw_verdict(rule, p, proposal, torch.arange(3), torch.full((3,), position))
            stop = rule.stop(p, proposal)
            distribution = rule.next(p, proposal, verdict.node)
            assert (stop.gather(1, verdict.node[:, None]) > 0).all()
            assert (distribution.gather(1, verdict.next_token[:, None]) > 0).all()
            assert (verdict.node <= proposal.counts).all()


@pytest.mark.parametrize("name", [n for n, rule in rules().items() if rule.lossless])
@pytest.mark.parametrize("parents", TREES[1:], ids=str)
def test_a_greedy_target_makes_every_lossless_rule_a_walk(name: str, parents: list[int]) -> None:
    if not rules()[name].trees and parents != list(range(len(parents))):
        parents = [0]
    for seed in range(5):
        for p, proposal in proposals(make_rule(name), "one-hot", parents, 3, seed):
            p, tree = _same_after_the_same(p, proposal), proposal.tree
            best = p.argmax(-1)  # [B, M]
            expected = accept_matching(best, proposal)
            verdict = draw_verdict(make_rule(name), p, proposal, torch.arange(3), torch.arange(3))
            rows = torch.arange(3)
            assert verdict.next_token.equal(best[rows, verdict.node])
            # A rule may follow all siblings with the same token; the walk follows the eldest.
            assert (tree.depth[rows, verdict.node] >= tree.depth[rows, expected.node]).all()
            for row, path in enumerate(verdict.path(tree).tolist()):
                nodes = [0, *(node for node in path if node > 0)]
                for parent, node in pairwise(nodes):
                    assert proposal.tokens[row, node - 1] == best[row, parent]


def _same_after_the_same(p: Tensor, proposal: Proposal) -> Tensor:
    """Returns p ``[B, M, V]`` with one distribution for all nodes that say the same text."""
    p = p.clone()
    for row, parents in enumerate(proposal.tree.parents.tolist()):
        texts, first = {0: ()}, {(): 0}
        for node, parent in enumerate(parents, 1):
            texts[node] = (*texts[parent], int(proposal.tokens[row, node - 1]))
            p[row, node] = p[row, first.setdefault(texts[node], node)]
    return p


@pytest.mark.parametrize("name", [n for n, rule in rules().items() if rule.trees])
def test_a_row_has_the_verdict_that_it_has_alone(name: str) -> None:
    """Rows with different trees in one batch, padded to the largest."""
    torch.manual_seed(3)
    shapes = [[0, 0, 1, 2, 2], [0, 1, 1, 0], [0, 1, 2], [0, 0]]
    size, rule = max(map(len, shapes)), make(name, torch.zeros(4, 6, 3))
    p = torch.randn(4, size + 1, 3).double().softmax(-1)
    drafter = torch.randn(4, size + 1, 3).double().softmax(-1)
    tokens = torch.randint(3, (4, size))
    parents = torch.tensor([shape + [0] * (size - len(shape)) for shape in shapes])
    q = drafter.gather(1, parents[..., None].expand(-1, -1, 3))
    counts = torch.tensor([len(shape) for shape in shapes])
    for drawn in sorted(rule.takes, key=str):
        if drawn is DraftSampling.WITHOUT_REPLACEMENT:
            continue  # random tokens would repeat

        def distribution(q: Tensor, drawn: DraftSampling = drawn) -> Deterministic | Sampled:
            return Deterministic() if drawn is DraftSampling.DETERMINISTIC else Sampled(q)

        batch = Proposal(tokens, Tree(parents), counts, distribution(q))
        stop, end = rule.stop(p, batch), counts // 2
        following = rule.next(p, batch, end)
        for row, shape in enumerate(shapes):
            n, one = len(shape), slice(row, row + 1)
            alone = Proposal(
                tokens[one, :n], Tree.uniform(shape, 1), counts[one], distribution(q[one, :n])
            )
            found = rule.stop(p[one, : n + 1], alone)
            assert torch.allclose(stop[one, : n + 1], found, atol=1e-12)
            assert (stop[row, n + 1 :] == 0).all()
            assert torch.allclose(following[one], rule.next(p[one, : n + 1], alone, end[one]))


@pytest.mark.parametrize("name", ["block", "recursive", "traversal", "kseq", "canonical", "token"])
def test_points_are_verified_as_by_match(name: str) -> None:
    parents = [0, 1, 2] if not rules()[name].trees else [0, 0, 1, 2, 4]
    torch.manual_seed(0)
    p = torch.randn(4, len(parents) + 1, 4).double().softmax(-1)
    tokens = torch.randint(4, (4, len(parents)))
    counts = torch.tensor([len(parents), 2, 1, 0])
    proposal = Proposal(tokens, Tree.uniform(parents, 4), counts, Deterministic())
    rule, match = make_rule(name), make_rule("match")
    assert torch.allclose(rule.stop(p, proposal), match.stop(p, proposal))
    for node in range(len(parents) + 1):
        at = torch.full((4,), node).clamp(max=counts)
        assert torch.allclose(rule.next(p, proposal, at), match.next(p, proposal, at))


@pytest.mark.parametrize("name", list(rules()))
def test_nothing_drafted_is_plain_decoding(name: str) -> None:
    p = torch.randn(2, 1, 4).softmax(-1)
    if name == "reflective":
        rule = make_rule(name, weight=0).with_evidence(Evidence(second_copy_probs=p))
    else:
        rule = make(name, p)
    proposal = Proposal.empty(2)
    assert rule.stop(p, proposal).tolist() == [[1], [1]]
    assert torch.allclose(rule.next(p, proposal, torch.zeros(2).long()).to(p), p[:, 0])
