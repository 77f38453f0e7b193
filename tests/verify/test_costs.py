"""A round stays cheap where it is large: 60 nodes, and a vocabulary of 152,064 tokens."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.core.logits_pipeline import Branches, History, LogitsPipeline, RowOptions
from outpace.core.params import SamplingParams
from outpace.core.proposal import Deterministic, DraftSampling, Proposal, Sampled
from outpace.core.trees.tree import Tree
from outpace.core.trees.tree_shape import TreeShape
from outpace.heads.classifiers import JudgeHead
from outpace.verify.base import Evidence, Rule, draw_verdict
from outpace.verify.registry import make_rule, rules
from verify.costs import Memory, Operations

NODES = 60
WIDE = 152_064
SHAPE = list(TreeShape.branching([4, 2, 2, 1, 1]).parents)
ONE = torch.tensor([1])
RULE_LIMIT, DISTRIBUTION_LIMIT = 24_000_000, 24_000_000
"""Bytes beyond p and q: see docs/rules/README.md."""


@cache
def probs(vocabulary: int) -> tuple[Tensor, Tensor]:
    """p ``[1, M, V]`` and q ``[1, N, V]``, siblings with the same q."""
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(1, NODES + 1, vocabulary, generator=generator).pow_(8)
    p /= p.sum(-1, keepdim=True)
    return p, p.flip(-1)[:, SHAPE].contiguous()


def round_of(name: str, drawn: DraftSampling, vocabulary: int) -> tuple[Rule, Tensor, Proposal]:
    p, q = probs(vocabulary)
    options: dict[str, Any] = {"head": JudgeHead(torch.ones(3))} if name == "judge" else {}
    rule = make_rule(name, **options)
    evidence = Evidence(
        hidden_states=torch.ones(1, NODES + 1, 3),
        second_copy_probs=p,
        softmax_probs=p,
        draft_probs=q,
    )
    rule = rule.with_evidence(evidence)
    parents = SHAPE if rule.trees else list(range(NODES))
    # Without equal siblings: the top tokens of each distribution, in turn.
    rank = torch.tensor([SHAPE[:node].count(up) for node, up in enumerate(SHAPE)])
    tokens = q.topk(4).indices[0, torch.arange(NODES), rank][None]
    distribution = (
        Deterministic()
        if drawn is DraftSampling.DETERMINISTIC
        else Sampled(q, drawn is DraftSampling.IID)
    )
    return rule, p, Proposal(tokens, Tree.uniform(parents, 1), torch.tensor([NODES]), distribution)


def operations(name: str, drawn: DraftSampling) -> int:
    given = round_of(name, drawn, 1000)
    with Operations() as counted:
        draw_verdict(*given, ONE, ONE)
    return counted.count


@pytest.mark.parametrize(
    ("name", "drawn"),
    [
        ("traversal", DraftSampling.IID),
        ("traversal", DraftSampling.WITHOUT_REPLACEMENT),
        ("kseq", DraftSampling.IID),
    ],
)
def test_no_rule_for_trees_goes_node_by_node(name: str, drawn: DraftSampling) -> None:
    assert operations(name, drawn) <= 3 * operations("recursive", drawn) <= 1500


def test_drafts_that_agree_are_pooled_without_going_node_by_node() -> None:
    rule, p, proposal = round_of("kseq", DraftSampling.IID, 1000)
    same = Proposal(
        proposal.tokens * 0, Tree(proposal.tree.parents), proposal.counts, proposal.distribution
    )
    with Operations() as counted:
        draw_verdict(rule, p, same, ONE, ONE)
    assert counted.count <= 3 * operations("recursive", DraftSampling.IID)


CASES = [
    (name, drawn)
    for name, rule in rules().items()
    if name != "canonical"  # a reference, and too slow
    for drawn in sorted(rule.takes, key=str)
]


@pytest.mark.parametrize(("name", "drawn"), CASES, ids=str)
def test_a_verdict_copies_no_distributions(name: str, drawn: DraftSampling) -> None:
    rule, p, proposal = round_of(name, drawn, WIDE)
    memory = Memory()
    memory.ignore(*probs(WIDE))
    with memory:
        draw_verdict(rule, p, proposal, ONE, ONE)
    assert 0 < memory.peak <= RULE_LIMIT


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.8},
        {"temperature": 0.8, "top_k": 50},
        {"temperature": 0.8, "top_p": 0.5},
        {"temperature": 0.8, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.5},
    ],
    ids=lambda options: "+".join(options),
)
def test_distributions_take_little_more_than_themselves(options: dict[str, float]) -> None:
    logits = probs(WIDE)[0].log().mul_(2)
    pipeline = LogitsPipeline([RowOptions(SamplingParams(**options).resolve({}))], WIDE)
    tokens = torch.arange(NODES).expand(1, NODES + 1, NODES)
    branches = Branches(tokens, torch.ones(1, NODES + 1, NODES).tril(-1).bool())
    memory = Memory()
    memory.ignore(logits)
    with memory:
        made = pipeline(logits, branches, History([[1]], [[2, 3]]))
    assert memory.peak <= made.nbytes + DISTRIBUTION_LIMIT


def test_the_greedy_tokens_take_no_distributions() -> None:
    logits = probs(WIDE)[0]
    pipeline = LogitsPipeline([RowOptions(SamplingParams(temperature=0).resolve({}))], WIDE)
    branches = Branches(torch.zeros(1, NODES + 1, 0).long(), torch.zeros(1, NODES + 1, 0).bool())
    memory = Memory()
    memory.ignore(logits)
    with memory:
        best = pipeline.argmax_tokens(logits, branches, History([[1]], [[2, 3]]))
    assert memory.peak <= 100_000
    assert best.equal(logits.argmax(-1))
