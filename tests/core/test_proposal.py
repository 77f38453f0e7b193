"""What crosses the seams."""

from __future__ import annotations

import pytest
import torch

from outpace.core.proposal import Deterministic, Needs, Proposal, Sampled, Verdict
from outpace.core.trees.tree import Tree


def test_valid_marks_the_first_counts_nodes() -> None:
    tokens, counts = torch.zeros(3, 2, dtype=torch.long), torch.tensor([0, 1, 2])
    proposal = Proposal(tokens, Tree.chain(3, 2), counts, Deterministic())
    assert proposal.valid.tolist() == [[False, False], [True, False], [True, True]]


def test_an_empty_proposal_has_a_root_and_nothing_else() -> None:
    empty = Proposal.empty(2)
    assert (tuple(empty.tokens.shape), empty.tree.size, empty.counts.tolist()) == (
        (2, 0),
        0,
        [0, 0],
    )
    assert empty.tree.ancestors.tolist() == [[[True]], [[True]]]
    assert empty.valid.shape == (2, 0)


def test_the_path_of_a_verdict_is_the_accepted_nodes() -> None:
    tree = Tree.uniform([0, 0, 2], 3)
    verdict = Verdict(torch.tensor([0, 1, 3]), torch.tensor([7, 8, 9]))
    assert verdict.path(tree).tolist() == [[-1, -1, -1], [1, -1, -1], [2, 3, -1]]


def test_the_path_in_an_empty_tree_is_empty() -> None:
    verdict = Verdict(torch.tensor([0, 0]), torch.tensor([1, 2]))
    assert verdict.path(Tree.chain(2, 0)).shape == (2, 0)


def test_sampled_tokens_are_independent_unless_said_otherwise() -> None:
    assert Sampled(torch.ones(1, 1, 1)).with_replacement


def test_a_drafter_needs_nothing_unless_said_otherwise() -> None:
    assert Needs() == Needs(hidden_layers=(), softmax_probs=False)


def test_proposals_do_not_change() -> None:
    with pytest.raises(AttributeError):
        Proposal.empty(1).tokens = torch.zeros(1, 0)  # type: ignore[misc]
