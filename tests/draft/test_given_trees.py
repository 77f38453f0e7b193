"""Static trees that are given node by node."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace import LLM
from outpace.core.trees.tree_shape import TreeShape
from outpace.draft.base import Round
from outpace.draft.branching import shape_of
from outpace.draft.registry import find_drafter
from outpace.errors import ConfigError
from outpace.targets.hf.loading.loaded import LoadedModel
from targets.families import CONTEXT, PROMPTS, plain, target
from targets.generating import greedy, ids

PATHS = [[0], [0, 0], [1], [0, 0, 0], [0, 1], [2]]
PARENTS = (0, 1, 0, 2, 1, 0)


@pytest.mark.parametrize("method", ["draft_tree", "recycling", "medusa", "eagle3"])
def test_the_tree_that_is_given_is_drafted(method: str) -> None:
    dummy_options = find_drafter(method).dummy_options(LoadedModel(target("llama"), None, "llama"))
    config = {"method": method, **dummy_options, "branching": PATHS, "num_speculative_tokens": 6}
    llm = LLM(target("llama"), speculative_config=config, max_num_seqs=4, max_model_len=CONTEXT)
    drafted: list[Round] = []
    llm.engine.observers.append(drafted.append)
    expected = plain("llama", 24, tuple(map(tuple, PROMPTS)))
    assert ids(llm.generate(PROMPTS, greedy(24))) == expected
    parents = {tuple(row) for each in drafted for row in each.proposal.tree.parents.tolist()}
    assert PARENTS in parents


@st.composite
def shapes(draw: st.DrawFn) -> TreeShape:
    size = draw(st.integers(1, 12))
    return TreeShape(tuple(draw(st.integers(0, node)) for node in range(size)))


def paths_of(shape: TreeShape) -> list[list[int]]:
    paths: list[list[int]] = [[]]
    for node, parent in enumerate(shape.parents, 1):
        paths.append([*paths[parent], shape.children[parent].index(node)])
    return paths[1:]


@given(shapes())
def test_paths_name_the_shape_that_they_are_of(shape: TreeShape) -> None:
    assert shape_of(paths_of(shape)) == shape


@given(shapes(), st.randoms())
def test_other_orders_are_sorted(shape: TreeShape, dice: Any) -> None:
    paths = paths_of(shape)
    dice.shuffle(paths)
    found = shape_of(paths)
    assert found is not None
    assert sorted(paths_of(found)) == sorted(paths)


@pytest.mark.parametrize(
    ("paths", "sentence"),
    [
        ([[0], [1, 0]], r"names \[1, 0\] without \[1\]"),
        ([[0], [2]], r"names \[2\] without \[1\]"),
        ([[0], [0]], r"names \[0\] twice"),
        ([[0], []], "holds something else"),
        ([[0], [-1]], "holds something else"),
        ([[0], [0.5]], "holds something else"),
        ([[rank] for rank in range(257)], "names 257 nodes, and 256"),
        ([[0], 1], "list the children per node"),
    ],
)
def test_what_is_no_tree_is_said(paths: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        shape_of(paths)
