"""The option that says how many children the nodes of a tree have."""

from __future__ import annotations

import itertools
import operator

from outpace.core.tree_shape import LARGEST, TreeShape
from outpace.core.values import shown
from outpace.errors import ConfigError

BRANCHING_HELP = "Children of a node at each depth, such as [3, 2, 1]; 'auto': as it pays."


def shape_of(branching: object) -> TreeShape | None:
    """Returns the shape with so many children per node at each depth, None for "auto".

    Raises ``ConfigError`` for anything else, and for trees that are too large.
    """
    if branching == "auto":
        return None
    listed = list(branching) if isinstance(branching, (list, tuple)) else []
    if not listed or any(not isinstance(count, int) or count < 1 for count in listed):
        raise ConfigError(
            "branching must be 'auto' or list the children per node at each depth, such as "
            f"[3, 2, 1], not {shown(branching)}."
        )
    # Counted before it is built: a number with many digits would fill the memory with nodes.
    nodes = sum(itertools.accumulate(listed, operator.mul))
    if nodes > LARGEST:
        raise ConfigError(
            f"branching {shown(listed)} makes more nodes than are scored at once: choose one with "
            f"at most {LARGEST}, such as [3, 2, 1]."
        )
    return TreeShape.branching(listed)
