"""What a round costs: tensor operations, and the memory that is held at once."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operations(TorchDispatchMode):
    """Counts the tensor operations, views included."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Memory(TorchDispatchMode):
    """Adds up the bytes of what operations make, as long as it lives."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._known: set[int] = set()

    def ignore(self, *tensors: torch.Tensor) -> None:
        """Leaves out what was there before."""
        self._known |= {id(tensor.untyped_storage()) for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf.untyped_storage())
        return made

    def _add(self, storage: Any) -> None:
        if id(storage) in self._known:
            return
        self._known.add(id(storage))
        self._now += storage.nbytes()
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._drop, id(storage), storage.nbytes())

    def _drop(self, number: int, size: int) -> None:
        self._known.discard(number)
        self._now -= size
