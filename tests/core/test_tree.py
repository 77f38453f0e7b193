"""Trees against plain Python that follows one parent after another."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outpace.core.trees.tree import Tree


@st.composite
def parents(draw: st.DrawFn, size: int) -> list[int]:
    """A parent with a smaller number for each of ``size`` nodes."""
    return [draw(st.integers(0, node)) for node in range(size)]


@st.composite
def batches(draw: st.DrawFn) -> list[list[int]]:
    size = draw(st.integers(0, 8))
    return [draw(parents(size)) for _ in range(draw(st.integers(1, 3)))]


def tree_of(batch: list[list[int]]) -> Tree:
    return Tree(torch.tensor(batch, dtype=torch.long).reshape(len(batch), -1))


def path_to(node: int, parents: list[int]) -> list[int]:
    """Returns the nodes from depth 1 down to ``node``."""
    path: list[int] = []
    while node:
        path.insert(0, node)
        node = parents[node - 1]
    return path


@given(batches())
def test_ancestors_are_the_nodes_on_the_way_to_the_root(batch: list[list[int]]) -> None:
    nodes = range(len(batch[0]) + 1)
    expected = [[[a in (0, *path_to(n, row)) for a in nodes] for n in nodes] for row in batch]
    assert tree_of(batch).ancestors.tolist() == expected


@given(batches())
def test_depth_is_the_length_of_the_path(batch: list[list[int]]) -> None:
    nodes = range(len(batch[0]) + 1)
    expected = [[len(path_to(n, row)) for n in nodes] for row in batch]
    assert tree_of(batch).depth.tolist() == expected


@given(batches())
def test_paths_run_from_the_root_down_and_end_in_minus_one(batch: list[list[int]]) -> None:
    size = len(batch[0])
    expected = [[(path_to(n, row) + [-1] * size)[:size] for n in range(size + 1)] for row in batch]
    assert tree_of(batch).paths.tolist() == expected


@given(batches())
def test_child_of_is_the_parent_read_backwards(batch: list[list[int]]) -> None:
    size = len(batch[0])
    expected = [[[row[c] == n for c in range(size)] for n in range(size + 1)] for row in batch]
    assert tree_of(batch).child_of.tolist() == expected


@given(batches())
def test_sibling_rank_counts_the_elder_siblings(batch: list[list[int]]) -> None:
    expected = [[row[:node].count(parent) for node, parent in enumerate(row)] for row in batch]
    assert tree_of(batch).sibling_rank.tolist() == expected


@given(batches())
def test_children_by_rank_and_nodes_with_several(batch: list[list[int]]) -> None:
    tree, size = tree_of(batch), len(batch[0])
    of = [[[c for c, up in enumerate(row) if up == n] for n in range(size + 1)] for row in batch]
    tree_width = max(len(listed) for row in of for listed in row)
    assert tree.max_siblings == tree_width
    assert tree.height == int(tree.depth.max())
    for rank in range(tree_width):
        expected = [[listed[rank] if rank < len(listed) else -1 for listed in row] for row in of]
        assert tree.child[rank].tolist() == expected
    for rank, fork in enumerate(tree.forks, 1):
        found = list(zip(fork.row.tolist(), fork.node.tolist(), strict=True))
        assert found == [
            (b, n) for b, row in enumerate(of) for n, listed in enumerate(row) if len(listed) > rank
        ]


TABLES = ["ancestors", "depth", "paths", "child_of", "sibling_rank", "elder"]


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("length", [0, 1, 5])
def test_a_chain_equals_the_tree_with_the_same_parents(table: str, length: int) -> None:
    chain = Tree.chain(2, length)
    general = Tree(chain.parents)
    assert (chain.is_chain, general.is_chain) == (True, False)
    assert torch.equal(getattr(chain, table), getattr(general, table))
    assert (
        (chain.max_siblings, chain.height)
        == (general.max_siblings, general.height)
        == (length > 0, length)
    )


@pytest.mark.parametrize("table", TABLES)
def test_a_row_of_a_batch_equals_the_row_alone(table: str) -> None:
    batch = [[0, 0, 2, 2, 1], [0, 1, 2, 3, 4], [0, 0, 0, 0, 0]]
    together = getattr(tree_of(batch), table)
    for row, alone in enumerate(batch):
        assert torch.equal(together[row], getattr(tree_of([alone]), table)[0])


def test_a_uniform_tree_is_the_same_in_every_row() -> None:
    tree = Tree.uniform([0, 0, 1], 3)
    assert tree.parents.tolist() == [[0, 0, 1]] * 3
    assert (tree.rows, tree.size) == (3, 3)


@pytest.mark.parametrize(("parents", "chain"), [([], True), ([0, 1, 2], True), ([0, 0], False)])
def test_a_uniform_tree_knows_whether_it_is_a_chain(parents: list[int], chain: bool) -> None:
    assert Tree.uniform(parents, 1).is_chain is chain
