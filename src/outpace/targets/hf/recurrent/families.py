"""Models with recurrent states, and the places where their modules read and write them.

Nearly all ask the cache. Some keep states in attributes, others are handed them in an argument and
return them with their output.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from outpace.errors import ConfigError
from outpace.targets.base import KVCacheDtype
from outpace.targets.hf.cache import CACHE_ARGUMENTS, SlotCache, cache_name
from outpace.targets.hf.patching import patch_attribute
from outpace.targets.hf.recurrent.history import Columns, StateName
from outpace.targets.hf.recurrent.states import StateCache

Forward = Callable[..., Any]


class StateLocation:
    """The cache: modules ask it for their states by themselves."""

    is_external = False
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
        keeps the states after the last of them."""
        return forward(**given)

    @contextmanager
    def without_states(
        self, cache: StateCache, columns: Tensor, given: Mapping[str, Any]
    ) -> Iterator[Mapping[str, Any]]:
        """Lets a module begin to read all columns ``[A, T, H]`` of a pass without its states, while
        the block runs it with the arguments that are returned."""
        with cache.without_states():
            yield given


@dataclass(eq=False)
class AttributeStates(StateLocation):
    """Attributes of a module and of its parts."""

    attributes: Sequence[tuple[nn.Module, str, StateName]]
    is_external = True

    @contextmanager
    def watched(self) -> Iterator[None]:
        with self._restored_attributes():
            yield

    def read(self, cache: StateCache, forward: Forward, given: Mapping[str, Any]) -> Any:
        with self._restored_attributes():
            for owner, key, name in self.attributes:
                setattr(owner, key, cache.state(name))
            output = forward(**given)
            for owner, key, name in self.attributes:
                cache.set_state(name, getattr(owner, key))
        return output

    @contextmanager
    def _restored_attributes(self) -> Iterator[None]:
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
    name: StateName


@dataclass(eq=False)
class ArgumentStates(StateLocation):
    """A sequence of tensors in an argument; the module returns ``(output, sequence)``.

    names: of the states that are this module's own, by their place in the sequence. layer: where
    each tensor ``[A, H, L]`` holds the states of all layers, which of them is the module's; it is
    then changed in place.
    """

    module: nn.Module
    argument: str
    names: Mapping[int, StateName]
    layer: int | None = None
    shift: Shift | None = None
    is_external = True
    _size: int = 0  # of the sequence
    _empty: dict[StateName, Tensor] = field(default_factory=dict)  # after no token, [1, ...]

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

        with self.module.register_forward_pre_hook(note, with_kwargs=True):
            yield

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

    def _state(self, cache: StateCache, name: StateName) -> Tensor:
        state = cache.state(name, empty=self._empty[name])
        assert state is not None
        return state

    @contextmanager
    def without_states(
        self, cache: StateCache, columns: Tensor, given: Mapping[str, Any]
    ) -> Iterator[Mapping[str, Any]]:
        arguments = {**given, self.argument: None}
        if self.shift is None:
            yield arguments
            return
        name = self.shift.name
        before = cache.at_start(name, self._empty[name])
        assert cache.progress is not None
        shifted = _after_parents(columns, before, cache.progress.parents)
        with patch_attribute(self.shift.part, "forward", lambda _: shifted):
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


def _after_parents(columns: Tensor, before: Tensor, parents: Columns) -> Tensor:
    """Returns, for each of the columns ``[A, T, H]``, the one of its parent; ``before`` ``[A, H]``
    is what stood there before the pass."""
    rows, _, width = columns.shape
    every = [[own] * rows if isinstance(own, int) else list(own) for own in parents]
    index = torch.tensor(every, device=columns.device).t() + 1  # [A, T]
    known = torch.cat([before[:, None].to(columns.dtype), columns], 1)
    return known.gather(1, index[..., None].expand(-1, -1, width))


# -- models ----------------------------------------------------------------------------------------


STATES = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding", "recurrent"})
"""What transformers calls layers that have a state."""
NO_KV_LAYER_TYPES = STATES - {"hybrid", "hybrid_sliding"} | {"moe", "mlp"}
"""Layers that attend to nothing."""
LISTS = ("layer_types", "layers_block_type")
"""What configurations call the list of their layers' types. Recurrent Gemma's has the second name,
and no other before transformers 5.23."""

ATTRIBUTES = {
    "RecurrentGemmaRecurrentBlock": (
        ("", "conv1d_state", "conv"),
        ("rg_lru", "recurrent_states", "recurrent"),
    )
}
"""Classes of modules that keep their states in attributes: the part that has each, the attribute,
and the kind of state."""


@dataclass(frozen=True)
class StateArgument:
    """What a module is handed in the argument ``state``.

    kinds: of the states that are its own, by their place. of_all_layers: each tensor holds the
    states of all layers. shift: the part that shifts its input by a column; the state that is
    called "conv" is the column before the first.
    """

    kinds: Mapping[int, str]
    of_all_layers: bool = False
    shift: str = ""


ARGUMENT = "state"
_SCAN = "recurrent"
STATE_ARGUMENTS: Mapping[str, StateArgument] = {
    "RwkvSelfAttention": StateArgument(
        {1: "conv", 2: _SCAN, 3: _SCAN, 4: _SCAN}, True, "time_shift"
    ),
    "RwkvFeedForward": StateArgument({0: "conv"}, True, "time_shift"),
    "xLSTMLayer": StateArgument({0: _SCAN, 1: _SCAN, 2: _SCAN}),
    # Where the xlstm package is installed.
    "mLSTMLayer": StateArgument({0: _SCAN, 1: _SCAN, 2: _SCAN}),
}
"""Classes of modules that are handed their states."""
WITHOUT_CACHE = frozenset({"rwkv", "xlstm"})
"""Models of such modules: they know no cache of transformers, and nothing in them attends."""
FIRST_LAYER_FIRST = frozenset({"mamba", "mamba2", "falcon_mamba", "rwkv"})
"""Models whose hidden states begin with what the first layer makes of the embedding."""


def from_the_embedding(
    states: tuple[Tensor, ...], model_type: str, embedded: Callable[[], Tensor]
) -> tuple[Tensor, ...]:
    """Returns the hidden states that a model gives, numbered as in most: 0 is the embedding, -1
    what the output matrix reads. embedded: the embedding, for models that leave it out."""
    if model_type not in FIRST_LAYER_FIRST:
        return states
    return (embedded(), *states[:-2], states[-1])


OF_MAMBA = "cache_params"
"""What Mamba's models call their cache."""


def has_recurrent_states(config: Any) -> bool:
    """Returns whether a model of this configuration has layers with a state."""
    text = config.get_text_config()
    return text.model_type in WITHOUT_CACHE or bool(STATES & _types(text))


def attends(config: Any) -> bool:
    """Returns whether a model of this configuration has layers that attend."""
    text = config.get_text_config()
    types = _types(text)
    return text.model_type not in WITHOUT_CACHE and (not types or bool(types - NO_KV_LAYER_TYPES))


def _types(text: Any) -> set[str]:
    return {kind for name in LISTS for kind in getattr(text, name, None) or ()}


def cache_arguments(model: nn.Module, cache: SlotCache) -> dict[str, Any]:
    """Returns the arguments by which a model is given its cache for a pass."""
    loaded: Any = model
    if loaded.config.model_type in WITHOUT_CACHE:
        return {"use_cache": False}  # else it would make states that are not needed
    names = inspect.signature(model.forward).parameters
    of_mamba = OF_MAMBA in names and names.keys().isdisjoint(CACHE_ARGUMENTS)
    return {OF_MAMBA if of_mamba else cache_name(model.forward): cache, "use_cache": True}


def cache_for(
    model: nn.Module, rows: int, device: torch.device, kv_cache_dtype: KVCacheDtype = "auto"
) -> SlotCache:
    """Returns an empty cache for a model. States are held as they are, whatever its keys and values
    are; ``ConfigError`` for a model that has none of these."""
    loaded: Any = model
    if not has_recurrent_states(loaded.config):
        return SlotCache(rows, device, kv_cache_dtype)
    if kv_cache_dtype != "auto" and not attends(loaded.config):
        raise ConfigError(
            f"{type(model).__name__} keeps a state of one size instead of keys and values: leave "
            "kv_cache_dtype out."
        )
    wanted: Any = getattr(sys.modules[type(model).__module__], "MiniMaxCache", None)
    if wanted is None:
        return StateCache(rows, device, kv_cache_dtype)
    # The model takes no cache that is not of its own class.
    made: StateCache = type("LinearCache", (LinearCache, wanted), {})(rows, device, kv_cache_dtype)
    return made


class LinearCache(StateCache):
    """A cache with MiniMax's names for its states."""

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        return self.state(StateName(layer_idx, "recurrent", 0))

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.update_recurrent_state(linear_cache, layer_idx)

    def __len__(self) -> int:
        return len(self.layers)


def state_locations(model: nn.Module) -> dict[nn.Module, StateLocation]:
    """Returns the modules that look for their states elsewhere than in the cache, and where."""
    found: dict[nn.Module, StateLocation] = {}
    for module in model.modules():
        kind, number = type(module).__name__, len(found)
        if kind in ATTRIBUTES:
            found[module] = AttributeStates(
                [
                    (module.get_submodule(part), key, StateName(number, of, 0))
                    for part, key, of in ATTRIBUTES[kind]
                ]
            )
        elif kind in STATE_ARGUMENTS:
            found[module] = _argument_states(module, number, STATE_ARGUMENTS[kind])
    return found


def _argument_states(module: nn.Module, number: int, how: StateArgument) -> ArgumentStates:
    loaded: Any = module
    names = {at: StateName(number, kind, at) for at, kind in how.kinds.items()}
    layer: int | None = loaded.layer_id if how.of_all_layers else None
    if not how.shift:
        return ArgumentStates(module, ARGUMENT, names, layer)
    before = next(name for name in names.values() if name.kind == "conv")
    shift = Shift(module.get_submodule(how.shift), before)
    return ArgumentStates(module, ARGUMENT, names, layer, shift)
