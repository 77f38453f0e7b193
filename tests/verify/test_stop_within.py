"""A walk may be kept from nodes: it ends before the first of them, and draws what is allowed."""

from __future__ import annotations

import torch

from outpace.core.trees.tree import Tree
from outpace.verify.probs import next_within, stop_within


def test_it_ends_at_the_deepest_node_before_one_that_is_not_possible() -> None:
    tree = Tree(torch.tensor([[0, 0, 1, 2, 3]]))  # root: 1, 2; 1: 3; 2: 4; 3: 5
    stop = torch.tensor([[0.1, 0.2, 0.0, 0.3, 0.1, 0.3]])
    without_3 = torch.tensor([[True, True, False, True, True]])
    torch.testing.assert_close(
        stop_within(stop, without_3, tree), torch.tensor([[0.1, 0.8, 0.0, 0.0, 0.1, 0.0]])
    )
    torch.testing.assert_close(stop_within(stop, torch.ones(1, 5, dtype=torch.bool), tree), stop)
    torch.testing.assert_close(
        stop_within(stop, torch.zeros(1, 5, dtype=torch.bool), tree),
        torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0, 0.0]]),
    )


def test_what_is_drawn_is_allowed() -> None:
    following = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.3, 0.5], [1.0, 0.0, 0.0]]).double()
    allowed = torch.tensor([[0.1, 0.0, 0.2], [0.9, 0.05, 0.05], [0.0, 0.5, 0.5]]).double()
    expected = torch.tensor([[2 / 3, 0.0, 1 / 3], [0.2, 0.3, 0.5], [0.0, 0.5, 0.5]]).double()
    torch.testing.assert_close(next_within(following, allowed), expected)
    assert torch.equal(next_within(following, allowed)[1], following[1])
