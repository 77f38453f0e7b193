"""Shapes of drafts: their parts, their worth, and the best one by brute force."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.core.trees.tree_shape import TreeShape, chain_ranks


@st.composite
def shapes(draw: st.DrawFn) -> TreeShape:
    size = draw(st.integers(0, 9))
    return TreeShape(tuple(draw(st.integers(0, node)) for node in range(size)))


@given(shapes(), st.integers(0, 9))
def test_the_first_nodes_are_a_shape_with_the_same_worth(shape: TreeShape, nodes: int) -> None:
    chances = [[0.5, 0.25, 0.125] * 3] * 9
    part = shape.first(nodes)
    assert part.size == min(nodes, shape.size)
    assert part.reached(chances) == shape.reached(chances)[:nodes]
    assert part.depth == shape.depth[: part.size + 1]


@given(shapes())
def test_levels_hold_every_node_once_below_its_parent(shape: TreeShape) -> None:
    assert sorted(itertools.chain(*shape.levels)) == list(range(1, shape.size + 1))
    assert len(shape.levels) == shape.height
    for depth, (above, level) in enumerate(itertools.pairwise([(0,), *shape.levels]), 1):
        assert all(shape.depth[node] == depth for node in level)
        places = [(above.index(shape.parents[node - 1]), node) for node in level]
        assert places == sorted(places)


@given(shapes())
def test_every_end_of_a_walk_has_its_trail(shape: TreeShape) -> None:
    for end in range(shape.size + 1):
        path, node = [], end
        while node:
            path.insert(0, node)
            node = shape.parents[node - 1]
        ranks = shape.accepted_ranks(path)
        taken = [rank for _, rank in ranks if rank is not None]
        assert len(taken) == len(path)
        walked = 0
        for rank in taken:
            walked = shape.children[walked][rank]
        assert walked == end
        assert (ranks[len(path) :] == []) == (not shape.children[end])


def test_a_chain_has_the_trail_of_its_shape() -> None:
    for drafted in range(4):
        for accepted in range(drafted + 1):
            path = list(range(1, accepted + 1))
            assert chain_ranks(drafted, accepted) == TreeShape.chain(drafted).accepted_ranks(path)


def test_chances_of_all_ends_sum_to_one() -> None:
    shape, chances = TreeShape((0, 0, 1, 1, 2)), [[0.6, 0.3], [0.5, 0.2]]
    reached = [1.0, *shape.reached(chances)]
    stays = [
        here - sum(reached[child] for child in shape.children[node])
        for node, here in enumerate(reached)
    ]
    assert sum(stays) == pytest.approx(1, abs=1e-12)
    assert min(stays) >= 0


def every_shape(nodes: int) -> set[TreeShape]:
    return {
        TreeShape(parents)
        for parents in itertools.product(*[range(node + 1) for node in range(nodes)])
    }


@pytest.mark.parametrize(
    "chances",
    [
        [[0.9, 0.3, 0.1]] * 5,
        [[0.5, 0.4, 0.3]] * 5,
        [[0.7, 0.1, 0.05], [0.5, 0.4, 0.2], [0.9, 0.5, 0.1], [0.2, 0.1, 0.1], [0.1] * 3],
    ],
)
def test_where_levels_cost_nothing_the_grown_shape_is_the_best_of_all(
    chances: list[list[float]],
) -> None:
    for nodes in range(1, 6):
        grown = TreeShape.grown(nodes, chances, level=0.0, node=1.0)
        best = max(
            sum(shape.reached(chances))
            for shape in every_shape(nodes)
            if shape.max_siblings <= 3 and shape.height <= 5
        )
        assert sum(grown.reached(chances)) == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("level", [0.05, 0.2, 0.5])
def test_where_levels_have_a_price_it_comes_close(level: float) -> None:
    chances, node = [[0.7, 0.3, 0.2]] * 5, 0.05

    def rate(shape: TreeShape) -> float:
        return (1 + sum(shape.reached(chances))) / (1 + level * shape.height + node * shape.size)

    grown = TreeShape.grown(6, chances, level, node)
    found = max(rate(grown.first(nodes)) for nodes in range(7))
    best = max(
        rate(shape)
        for nodes in range(7)
        for shape in every_shape(nodes)
        if shape.max_siblings <= 3 and shape.height <= 5
    )
    assert found > 0.97 * best


def test_a_shape_grows_no_deeper_or_wider_than_it_has_chances_for() -> None:
    grown = TreeShape.grown(20, [[0.5, 0.5]] * 2, level=0.1, node=0.1)
    assert grown.size == 6
    assert (grown.height, grown.max_siblings) == (2, 2)
