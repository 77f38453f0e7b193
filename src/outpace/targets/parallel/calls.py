"""The calls that the first process sends the others: bytes, in one broadcast."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from outpace.core.trees.tree import Tree

HEAD = 4096
"""Bytes of the broadcast that begins a message: those of most rounds fit into it."""

_LENGTH = 8
"""Bytes at its beginning that say how long the message is."""


class Call(NamedTuple):
    """A call that every process makes."""

    name: str
    arguments: tuple[Any, ...] = ()
    target: int = 0
    """The number of the target that it is made of; 0 for one that is of no target."""


def send(data: bytes, group: Any) -> None:
    """Gives the other processes calls that were `packed`; they are in `receive`."""
    begin = len(data).to_bytes(_LENGTH, "little") + data[: HEAD - _LENGTH]
    head = torch.zeros(HEAD, dtype=torch.uint8)
    head[: len(begin)] = torch.frombuffer(bytearray(begin), dtype=torch.uint8)
    distributed.broadcast(head, 0, group=group)
    rest = data[HEAD - _LENGTH :]
    if rest:
        distributed.broadcast(torch.frombuffer(bytearray(rest), dtype=torch.uint8), 0, group=group)


def receive(group: Any, device: torch.device) -> list[Call]:
    """Waits for calls, and returns them. device: of the tensors in them that are on one."""
    head = torch.zeros(HEAD, dtype=torch.uint8)
    distributed.broadcast(head, 0, group=group)
    begin = head.numpy().tobytes()
    length = int.from_bytes(begin[:_LENGTH], "little")
    data = begin[_LENGTH : _LENGTH + length]
    if len(data) < length:
        rest = torch.zeros(length - len(data), dtype=torch.uint8)
        distributed.broadcast(rest, 0, group=group)
        data += rest.numpy().tobytes()
    return unpacked(data, device)


def packed(calls: Sequence[Call]) -> bytes:
    """Returns calls as bytes."""
    buffer = io.BytesIO()
    _Packer(buffer, pickle.HIGHEST_PROTOCOL).dump([*calls])
    return buffer.getvalue()


def unpacked(data: bytes, device: torch.device) -> list[Call]:
    """Returns the calls that were `packed`, with their tensors on this process's own device."""
    found: list[Call] = _Unpacker(data, device).load()
    return found


class _Packer(pickle.Pickler):
    """Tensors become their bytes: torch would bring those of a GPU back to the GPU of the same
    number, which is another process's. Trees are sent without what was derived from them."""

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        whole = obj.detach().cpu().contiguous()
        data = whole.flatten().view(torch.uint8).numpy().tobytes()
        return data, whole.dtype, tuple(whole.shape), obj.device.type

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tree:
            return Tree, (obj.parents, obj.is_chain)
        return NotImplemented


class _Unpacker(pickle.Unpickler):
    def __init__(self, data: bytes, device: torch.device) -> None:
        super().__init__(io.BytesIO(data))
        self._device = device

    def persistent_load(self, pid: Any) -> Tensor:
        data, dtype, shape, kind = pid
        flat = (
            torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
        )
        found = flat.view(shape)
        return found if kind == "cpu" else found.to(self._device)
