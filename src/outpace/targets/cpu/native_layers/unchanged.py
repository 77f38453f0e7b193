"""Whether modules are still those whose weights our own code reads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import nn


class Unchanged:
    """The children and the ``forward`` of some modules, as they were when this was made.

    Our own code reads the weights of a layer's modules itself. It would not notice that somebody
    has put another module in the place of one (an adapter, a quantised layer), or another function
    in the place of one's ``forward``.
    """

    def __init__(self, parents: Sequence[nn.Module], modules: Sequence[nn.Module]) -> None:
        """parents: those whose children stay; modules: those that keep their ``forward``."""
        self._parents = [parent for parent in parents if parent._modules]
        self._modules = list(modules)
        self._children_then = self._children()
        self._forwards_then = self._forwards()

    def __bool__(self) -> bool:
        """Whether they still are as they were. It is asked in each pass, and takes some
        microseconds for a model."""
        return self._children_then == self._children() and self._forwards_then == self._forwards()

    def _children(self) -> list[Any]:
        return list(chain.from_iterable(module._modules.values() for module in self._parents))

    def _forwards(self) -> list[Any]:
        """The ``forward`` of each module that has one of its own; None for others."""
        return [module.__dict__.get("forward") for module in self._modules]
