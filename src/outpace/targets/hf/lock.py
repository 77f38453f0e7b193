"""One thread at a time computes with a model, whoever it is for."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn


class ModelLocks:
    """A lock for each model.

    Some passes exchange or hook modules of the model for as long as they last: a draft that leaves
    out layers, columns that join at a later layer, positions that the model would have counted by
    itself. Another pass over the same model, of another `LLM` in another thread, would see that.
    The locks are not kept on the models, which may be the caller's own and be copied or pickled.
    """

    def __init__(self) -> None:
        self._making = threading.Lock()
        self._locks: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()

    def __call__(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Returns the lock of a model. The thread that holds it may take it again."""
        with self._making:
            found = self._locks.get(model)
            if found is None:
                found = self._locks[model] = threading.RLock()
            return found


model_lock = ModelLocks()
"""The lock of each model in this process: models know nothing of who computes with them."""
