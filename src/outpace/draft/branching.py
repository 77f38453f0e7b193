"""The options that say how many children the nodes of a tree have."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Le

from outpace.core.options import Options
from outpace.core.trees.tree_shape import MAX_TREE_NODES, TreeShape
from outpace.core.values import is_integer, shown
from outpace.draft.dynamic import DynamicTrees
from outpace.errors import ConfigError, did_you_mean

AUTO, DYNAMIC = "auto", "dynamic"
TOP_K, DEPTH = 10, 6
"""What dynamic trees have where the options say nothing else, as EAGLE-2's: ``TOP_K`` nodes of a
level are expanded, each into as many children, and there are ``DEPTH`` levels at most."""


@dataclass(frozen=True, kw_only=True)
class TreeOptions(Options):
    """The options of a model or head that drafts trees of any kind."""

    branching: Any = AUTO
    """Children of a node at each depth, such as [3, 2, 1]; all nodes by their paths, such as
    [[0], [1], [0, 0]]; 'auto': as it pays; 'dynamic': the nodes that the drafter finds most
    probable."""
    top_k: Annotated[int | None, Ge(1), Le(MAX_TREE_NODES)] = None
    """Nodes of a level that are expanded, and children of each; dynamic trees (10)."""
    depth: Annotated[int | None, Ge(1), Le(MAX_TREE_NODES)] = None
    """Levels at most; dynamic trees (6)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dynamic_trees is not None:
            return
        for name in ("top_k", "depth"):
            if getattr(self, name) is not None:
                raise ConfigError(f"{name!r} is about dynamic trees: add branching 'dynamic'.")
        shape_of(self.branching, (AUTO, DYNAMIC))

    @property
    def dynamic_trees(self) -> DynamicTrees | None:
        """How dynamic trees grow, None where they are not asked for."""
        if not (isinstance(self.branching, str) and self.branching == DYNAMIC):
            return None
        return DynamicTrees(self.top_k or TOP_K, self.depth or DEPTH)


def checked_branching(name: str, value: Any) -> Any:
    """Returns the branching of trees that are not dynamic, as it was given."""
    shape_of(value)
    return value


def shape_of(branching: object, words: Sequence[str] = (AUTO,)) -> TreeShape | None:
    """Returns the shape with n children per node at each depth, or with the nodes of these
    paths (`TreeShape.of_paths`); None for "auto".

    words: all that the drafter's option may be instead of a list, for the error's sentence. Raises
    ``ConfigError`` for anything else, and for trees that are too large.
    """
    if isinstance(branching, str) and branching == AUTO:
        return None
    listed = list(branching) if isinstance(branching, (list, tuple)) else []
    if listed and all(isinstance(each, (list, tuple)) for each in listed):
        return _of_paths(listed)
    if not listed or any(not is_integer(count) or count < 1 for count in listed):
        named = ", ".join(repr(word) for word in words)
        hint = did_you_mean(branching, words) if isinstance(branching, str) else ""
        raise ConfigError(
            f"branching must be {named} or list the children per node at each depth, such as "
            f"[3, 2, 1], or all nodes by their paths, such as [[0], [1], [0, 0]], not "
            f"{shown(branching)}{hint}."
        )
    # Counted before it is built: a number with many digits would fill the memory with nodes.
    listed = [int(count) for count in listed]
    nodes = sum(itertools.accumulate(listed, operator.mul))
    if nodes > MAX_TREE_NODES:
        raise ConfigError(
            f"branching {shown(listed)} makes more nodes than are scored at once: choose one with "
            f"at most {MAX_TREE_NODES}, such as [3, 2, 1]."
        )
    return TreeShape.branching(listed)


def _of_paths(paths: Sequence[Sequence[Any]]) -> TreeShape:
    """The shape of nodes that are named by their paths, in plain numbers."""
    if any(not path or any(not is_integer(rank) or rank < 0 for rank in path) for path in paths):
        raise ConfigError(
            "a path in branching lists ranks among siblings from the root on, 0 for the eldest, "
            f"such as [0, 1], and {shown(list(paths))} holds something else."
        )
    if len(paths) > MAX_TREE_NODES:
        raise ConfigError(
            f"branching names {len(paths)} nodes, and {MAX_TREE_NODES} are scored at once at most."
        )
    try:
        return TreeShape.of_paths([[int(rank) for rank in path] for path in paths])
    except ValueError as error:
        raise ConfigError(
            f"branching names {error}: each node needs its parent and its elder siblings, once."
        ) from error
