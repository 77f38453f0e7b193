"""Where a module looks for its states, and where it puts the new ones.

Nearly all ask the cache. Some keep states in attributes, others are handed them in an argument and
return them beside their output.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from outpace.targets.hf.partial.layers import exchanged_forward
from outpace.targets.hf.recurrent.states import Columns, Name, StateCache

Forward = Callable[..., Any]


class Places:
    """The cache: modules ask it for their states by themselves."""

    lent = False
    """Whether somebody else has to bring the states and to fetch them, each time."""
    shifts = False
    """Whether a module, but for one shift of its input, computes all inputs of its scan from single
    columns: then all its parts can be run before the scan."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Learns what there is to learn from a pass over one token, while the block runs it."""
        yield

    def read(self, cache: StateCache, forward: Forward, given: Mapping[str, Any]) -> Any:
        """Returns what a module makes of some columns, ``[A, T, H]`` in its first argument, and
        keeps the states behind the last of them."""
        return forward(**given)

    @contextmanager
    def untouched(
        self, cache: StateCache, columns: Tensor, given: Mapping[str, Any]
    ) -> Iterator[Mapping[str, Any]]:
        """Lets a module begin to read all columns ``[A, T, H]`` of a pass without its states, while
        the block runs it with the arguments that are returned."""
        with cache.untouched():
            yield given


@dataclass(eq=False)
class InAttributes(Places):
    """Attributes of a module and of its parts."""

    attributes: Sequence[tuple[nn.Module, str, Name]]
    lent = True

    @contextmanager
    def watched(self) -> Iterator[None]:
        with self._as_they_were():
            yield

    def read(self, cache: StateCache, forward: Forward, given: Mapping[str, Any]) -> Any:
        with self._as_they_were():
            for owner, key, name in self.attributes:
                setattr(owner, key, cache.state(name))
            output = forward(**given)
            for owner, key, name in self.attributes:
                cache.set_state(name, getattr(owner, key))
        return output

    @contextmanager
    def _as_they_were(self) -> Iterator[None]:
        before = [(owner, key, getattr(owner, key)) for owner, key, _ in self.attributes]
        try:
            yield
        finally:
            for owner, key, value in before:
                setattr(owner, key, value)


@dataclass(frozen=True)
class Shift:
    """A part that puts each column's predecessor in its place, and the state that stands before the
    first one: the last column that was read."""

    part: nn.Module
    name: Name


@dataclass(eq=False)
class InArgument(Places):
    """A sequence of tensors in an argument; the module returns ``(output, sequence)``.

    names: of the states that are this module's own, by their place in the sequence. layer: where
    each tensor ``[A, H, L]`` holds the states of all layers, which of them is the module's; it is
    then changed in place.
    """

    module: nn.Module
    argument: str
    names: Mapping[int, Name]
    layer: int | None = None
    shift: Shift | None = None
    lent = True
    _size: int = 0  # of the sequence
    _empty: dict[Name, Tensor] = field(default_factory=dict)  # behind no token, [1, ...]

    @property
    def shifts(self) -> bool:  # type: ignore[override]
        return self.shift is not None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A pass that is handed no states lets the model make those that a text begins with."""
        takes = inspect.signature(self.module.forward)

        def note(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            states = takes.bind(*args, **options).arguments[self.argument]
            self._size = len(states)
            for at, name in self.names.items():
                own = states[at] if self.layer is None else states[at][:, :, self.layer]
                self._empty[name] = own[:1].clone()

        hook = self.module.register_forward_pre_hook(note, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def read(self, cache: StateCache, forward: Forward, given: Mapping[str, Any]) -> Any:
        alone = next(iter(given.values())).shape[1] == 1
        own = {at: self._state(cache, name) for at, name in self.names.items()}
        handed: list[Any] = [None] * self._size
        for at, state in own.items():
            shifted = alone and self.shift is not None and self.shift.name == self.names[at]
            handed[at] = state if self.layer is None else _OfAnyLayer(state, shifted)
        output = forward(**{**given, self.argument: handed})
        for at, state in own.items():
            made = output[1][at]
            cache.set_state(self.names[at], state if made is handed[at] else state.copy_(made))
        return (output[0], *[None] * (len(output) - 1))

    def _state(self, cache: StateCache, name: Name) -> Tensor:
        state = cache.state(name, empty=self._empty[name])
        assert state is not None
        return state

    @contextmanager
    def untouched(
        self, cache: StateCache, columns: Tensor, given: Mapping[str, Any]
    ) -> Iterator[Mapping[str, Any]]:
        arguments = {**given, self.argument: None}
        if self.shift is None:
            yield arguments
            return
        name = self.shift.name
        before = cache.at_start(name, self._empty[name])
        assert cache.reading is not None
        shifted = _behind_parents(columns, before, cache.reading.parents)
        with exchanged_forward(self.shift.part, lambda _: shifted):
            yield arguments


@dataclass(eq=False)
class _OfAnyLayer:
    """Stands for a tensor ``[A, H, L]`` with the states of all layers: whichever is asked for, it
    is the one of the module that reads now."""

    state: Tensor  # [A, H]
    as_column: bool
    """Whether it is wanted as ``[A, 1, H]``, to stand beside the single column of a pass: RWKV's
    own code would mix the rows of a batch there."""

    def __getitem__(self, place: Any) -> Tensor:
        return self.state[:, None] if self.as_column else self.state

    def __setitem__(self, place: Any, state: Tensor) -> None:
        self.state.copy_(state)


def _behind_parents(columns: Tensor, before: Tensor, parents: Columns) -> Tensor:
    """Returns, for each of the columns ``[A, T, H]``, the one of its parent; ``before`` ``[A, H]``
    is what stood there before the pass."""
    rows, _, width = columns.shape
    every = [[own] * rows if isinstance(own, int) else list(own) for own in parents]
    index = torch.tensor(every, device=columns.device).t() + 1  # [A, T]
    known = torch.cat([before[:, None].to(columns.dtype), columns], 1)
    return known.gather(1, index[..., None].expand(-1, -1, width))
