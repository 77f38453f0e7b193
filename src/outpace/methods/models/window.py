"""The window of a text that a draft model reads, where its context is too short for all of it."""

from __future__ import annotations

from outpace.core.trees.tree_shape import MAX_TREE_NODES

LEAST, SHARE = 64, 8
"""Slots of a context that are kept free for drafts: LEAST, or one in SHARE if that is more."""


def reserve(context: int) -> int:
    """Returns how many slots of a context are kept free for drafts: no draft is longer. Half of a
    context stays for the text in any case.

    >>> [reserve(context) for context in (16, 256, 1024, 32_768)]
    [8, 64, 128, 256]
    """
    return min(max(LEAST, context // SHARE), context // 2, MAX_TREE_NODES)


def window_start(length: int, context: int) -> int:
    """Returns the first token that is read of a text of this length: 0 as long as the text and a
    draft fit into the context. After that it moves on by half of what the text may take, each time
    that this is full.

    >>> [window_start(length, 256) for length in (192, 193, 288, 289)]
    [0, 96, 96, 192]
    """
    most = context - reserve(context)
    step = max(1, most // 2)
    return max(0, -(-(length - most) // step) * step)
