"""Parts of a module that are exchanged for the time of a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def patch_attribute(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Gives a module another attribute, method or buffer while the block runs."""
    own: Any = module
    held = name in own.__dict__ or name in own._buffers  # else it is the class's
    before = getattr(own, name)
    setattr(own, name, value)
    try:
        yield
    finally:
        if held:
            setattr(own, name, before)
        else:
            delattr(own, name)


@contextmanager
def patch_argument(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Lets a module be called with another keyword argument while the block runs."""

    def called(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return given, {**named, name: value}

    with module.register_forward_pre_hook(called, with_kwargs=True):
        yield


@contextmanager
def patch_output(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Changes what a module returns while the block runs."""
    with module.register_forward_hook(lambda _, __, output: change(output)):
        yield
