"""Two devices more on a machine that has none: tensors there have the numbers of a CPU, and
whatever reads numbers of two devices at once fails, as it does on GPUs.

    with two_devices() as (first, second):
        torch.zeros(3, device=first) + torch.zeros(3, device=second)   # raises
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

KIND = "lazy"
"""A kind of device that torch knows by name, also where it has nothing that computes there."""


class There(Tensor):
    """A tensor on another device. ``inner`` has its numbers."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> There:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device,
            requires_grad=False,
        )
        made.inner = inner
        return made

    def tolist(self) -> Any:
        return self.inner.tolist()

    def __repr__(self, **_: Any) -> str:
        return f"There({self.inner!r}, {self.device})"

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), named: Any = None
    ) -> Any:
        return played(function, args, named or {})


MOVES = ("aten::_to_copy", "aten::to", "aten::copy_")


def played(function: Any, args: Any, named: dict[str, Any]) -> Any:
    """Returns what an operation gives on the device of its tensors, or on the one that it names."""
    given = tree_leaves((args, named))
    asked = [value for value in given if isinstance(value, torch.device)]
    # A single number of the CPU may go with tensors of any device.
    tensors = [one for one in given if isinstance(one, There) or (_is_tensor(one) and one.dim())]
    found = list(dict.fromkeys(tensor.device for tensor in tensors))
    name = function._schema.name
    if len(found) > 1 and name not in MOVES:
        raise RuntimeError(f"{name} was given tensors on {', '.join(map(str, found))}")
    if name == "aten::copy_":
        there = args[0].device
    else:
        there = next(iter([*asked, *found]), torch.device("cpu"))
    inner_args, inner_named = tree_map(_inner, (args, named))
    result = function(*inner_args, **inner_named)
    if there.type != KIND:
        return result
    here = (one for one in given if isinstance(one, There) and one.device == there)
    known = {id(one.inner): one for one in here}  # what works in place, or changes nothing

    def back(value: Any) -> Any:
        if not _is_tensor(value):
            return value
        return known[id(value)] if id(value) in known else There(value, there)

    return tree_map(back, result)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _inner(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value.inner if isinstance(value, There) else value


class Here(TorchDispatchMode):
    """Makes tensors on devices of this kind, too, where they are asked for by name."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), named: Any = None
    ) -> Any:
        return played(function, args, named or {})


class Given(TorchFunctionMode):
    """Brings numbers of Python there, for which torch asks the device itself."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), named: Any = None
    ) -> Any:
        named = named or {}
        if function in (Tensor.__getitem__, Tensor.__setitem__):
            args = args[0], _as_index(args[1], args[0].device), *args[2:]
        elif function is Tensor.new_tensor:
            return torch.tensor(*args[1:], **{"dtype": args[0].dtype, **named}).to(args[0].device)
        elif function in (torch.tensor, torch.as_tensor) and named.get("device") is not None:
            device = named.pop("device")
            return function(*args, **named).to(device)
        return function(*args, **named)


def _as_index(index: Any, device: torch.device) -> Any:
    """Returns an index with tensors on a device in the place of lists."""
    if isinstance(index, tuple):
        return tuple(_as_index(one, device) for one in index)
    if not isinstance(index, list):
        return index
    return torch.tensor(index, dtype=None if index else torch.long).to(device)


@contextmanager
def two_devices() -> Iterator[tuple[torch.device, torch.device]]:
    """Yields two devices that there are while the block runs."""
    known = torch.is_autocast_enabled
    with pytest.MonkeyPatch.context() as patch, Here(), Given():
        patch.setattr(torch, "is_autocast_enabled", lambda kind: kind != KIND and known(kind))
        patch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
        yield torch.device(KIND, 0), torch.device(KIND, 1)
