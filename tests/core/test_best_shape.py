"""The best shapes by dynamic programming, compared with every shape there is and with growth."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.test_tree_shape import every_shape
from outpace.core.trees.best_shape import BestShapes, best_shape
from outpace.core.trees.tree_shape import AcceptanceProbs, TreeShape

NODES = 5
ALL = [shape for nodes in range(NODES + 1) for shape in every_shape(nodes)]
chances_of_three = st.lists(
    st.lists(st.floats(0, 1), min_size=1, max_size=3), min_size=1, max_size=4
)


def fits(shape: TreeShape, chances: AcceptanceProbs) -> bool:
    """Whether every node has a chance."""
    return shape.height <= len(chances) and all(
        len(below) <= len(chances[depth])
        for depth, below in zip(shape.depth, shape.children, strict=True)
        if below
    )


@settings(max_examples=60, deadline=None)
@given(chances_of_three, st.integers(1, NODES))
def test_no_shape_promises_more(chances: AcceptanceProbs, nodes: int) -> None:
    tables = BestShapes(nodes, len(chances), chances)
    best = max(
        sum(shape.reached(chances)) for shape in ALL if shape.size <= nodes and fits(shape, chances)
    )
    assert tables.expected(nodes) == pytest.approx(best, abs=1e-12)
    shape = tables.shape(nodes)
    assert shape.size <= nodes
    assert fits(shape, chances)
    assert sum(shape.reached(chances)) == pytest.approx(best, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(chances_of_three, st.floats(0, 0.6), st.floats(0.01, 0.3))
def test_no_shape_promises_more_for_its_price(
    chances: AcceptanceProbs, level: float, node: float
) -> None:
    def price(nodes: int, levels: int) -> float:
        return 1 + node * nodes + level * levels

    def rate(shape: TreeShape) -> float:
        return (1 + sum(shape.reached(chances))) / price(shape.size, shape.height)

    found = best_shape(NODES, chances, price)
    assert rate(found) == pytest.approx(max(rate(s) for s in ALL if fits(s, chances)), abs=1e-12)


@pytest.mark.parametrize("nodes", [12, 24])
def test_where_levels_cost_nothing_growth_finds_the_same(nodes: int) -> None:
    chances = [[0.7, 0.3, 0.2, 0.1]] * 8
    grown = TreeShape.grown(nodes, chances, level=0, node=1)
    assert BestShapes(nodes, 8, chances).expected(nodes) == pytest.approx(
        sum(grown.reached(chances)), abs=1e-12
    )


def test_nodes_stand_in_the_order_of_their_worth() -> None:
    chances = [[0.7, 0.3, 0.2, 0.1]] * 8
    reached = BestShapes(20, 8, chances).shape(20).reached(chances)
    assert reached == pytest.approx(sorted(reached, reverse=True), abs=1e-12)
