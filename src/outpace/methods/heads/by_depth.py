"""Guesses that are all there before a draft begins."""

from __future__ import annotations

from torch import Tensor

from outpace.core.trees.tree import Tree


class ByDepth:
    """The `Walk` of a head whose guesses are made at once, those of each depth whatever the tokens
    in between are."""

    def __init__(self, logits: Tensor) -> None:
        """logits: ``[B, K, V]``, of K depths."""
        self._logits, self._depth = logits, 0

    def first(self) -> Tensor:
        """Returns the logits ``[B, V]`` behind the roots."""
        return self._logits[:, 0]

    def deeper(self, fed: Tensor, tree: Tree, parents: Tensor) -> Tensor:
        """Returns those of the next depth ``[B, W, V]``, the same for all of its nodes.

        parents: ``[W]`` or ``[B, W]``.
        """
        self._depth += 1
        return self._logits[:, self._depth, None].expand(-1, parents.shape[-1], -1)
