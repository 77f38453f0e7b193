"""Passes of a model with states: which columns are read at once, and which one by one.

transformers' modules give the state after the last column that they have read. To have it after
every drafted column they read them one after the other, with the code that plain decoding uses.
What costs most of the time, the projections of a module's input and of its result, is done for all
columns at once: it knows no state.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from outpace.targets.hf.patching import patch_attribute
from outpace.targets.hf.plain import dummy_tokens
from outpace.targets.hf.recurrent.families import StateLocation, state_locations
from outpace.targets.hf.recurrent.history import PassProgress, StateName, parents_of
from outpace.targets.hf.recurrent.states import SavedStates, StateCache, StateWriteBlocked
from outpace.targets.hf.runner_hooks import PassInfo, RunnerHooks

Runner = Any
"""What runs a model over rows (`hf.runner`), and these steps among others."""

TRIAL = 16
"""Tokens that a runner holds on which a model is tried out."""
_LOUD, _LOUDER = 8.0, 64.0
_TOLERANCE = 0.05


class ColumnStepper(RunnerHooks):
    """How the passes of one model with recurrent states read their columns.

    All that may be taken back is read column by column, so that the state after each is there.
    Committed tokens in front of it are read at once, as transformers reads a prompt.
    """

    supports_padding = False
    why_not_fixed = "goes on from a state"

    def __init__(self, cache: StateCache, another: Callable[[], Runner]) -> None:
        """another: makes a runner of the same model, with one row, to try something out."""
        self._cache, self._another = cache, another
        self._mixers: list[Mixer] = []

    def find_mixers(self, runner: Runner) -> None:
        """Finds the modules that keep a state, by a pass over one token."""
        runner.admit(1)
        found: list[Mixer] = []
        with finding_mixers(runner.model, self._cache, state_locations(runner.model), found):
            # With a cache also where it takes none of ours: then it makes states of its own.
            runner.forward(_tokens(runner, 1), keep=1, use_cache=True)
        runner.reset()
        self._mixers = found

    @contextmanager
    def around(self, given: PassInfo) -> Iterator[None]:
        """Lets the model read a pass while the block runs. Of the columns that are committed,
        whatever the verdict, only the state after the last is kept."""
        parents = parents_of(given.columns, given.tree)
        self._cache.begin(
            PassProgress(given.first, given.starts, parents, given.num_committed, end=given.columns)
        )
        parts = self._parts(given.columns, given.num_committed, max(given.starts) > 0)
        with stepping(self._mixers, self._cache, parts):
            yield
        self._cache.end()

    def _parts(self, columns: int, num_committed: int, goes_on: bool) -> Parts:
        at_once = num_committed if num_committed > 1 and (not goes_on or self.continues) else 0
        ones = [(column, column + 1) for column in range(at_once, columns)]
        return [(0, at_once), *ones] if at_once else ones

    @cached_property
    def continues(self) -> bool:
        """Whether several columns that are read at once go on from the state that is there.

        Some models begin anew then, without an error. Tried out with states that are loud enough
        to be missed: read at once, they must come out as if read one by one, and another state
        must come out as another one.
        """
        runs = ((True, _LOUD), (False, _LOUD), (True, _LOUDER))
        with ExitStack() as hooks:
            # Layers that are hooked run by their own code, which is what is tried out.
            for mixer in self._mixers:
                hooks.callback(mixer.module.register_forward_pre_hook(_nothing).remove)
            at_once, by_steps, other = (_states_of_trial(self._another(), *run) for run in runs)
        return all(
            _near(at_once[name], state)
            and (name.kind != "recurrent" or not torch.equal(at_once[name], other[name]))
            for name, state in by_steps.items()
        )


def _nothing(module: nn.Module, args: Any) -> None:
    """A hook that does nothing."""


def _near(state: Tensor, other: Tensor) -> bool:
    return bool((state - other).norm() <= _TOLERANCE * other.norm())


@torch.inference_mode()
def _states_of_trial(runner: Runner, continues: bool, loudness: float) -> dict[StateName, Tensor]:
    """The states after a few tokens, of which those after loud states are read at once or not."""
    cache = runner.cache
    assert runner.steps is not None
    assert isinstance(cache, StateCache)
    runner.steps.continues = continues
    runner.admit(1)
    runner.forward(_tokens(runner, 2), keep=1)
    runner.advance([2])
    cache.restore_states(0, _scaled(cache.saved_states(0, 2), loudness), [1])
    runner.forward(_tokens(runner, 3), keep=1)
    return {name: state.double() for name, state in cache.saved_states(0, 5)[4].items()}


def _scaled(states: SavedStates, by: float) -> SavedStates:
    """The same with other recurrent states: loud inputs of a convolution would drown these."""
    return {
        at: {name: state * (by if name.kind == "recurrent" else 1) for name, state in held.items()}
        for at, held in states.items()
    }


def _tokens(runner: Runner, count: int) -> Tensor:
    return torch.tensor([dummy_tokens(runner.model, count)], device=runner.device)


# -- the modules that keep a state -----------------------------------------------------------------


Parts = Sequence[tuple[int, int]]
"""Beginning and end of the columns that are read at once."""


@dataclass(frozen=True, eq=False)
class Mixer:
    """A module that keeps a state.

    entries: its parts that read its input as it is. early: others that make the inputs of its
    convolution or scan, before any state is known. exit: the part whose result is its own.
    location: where it looks for its states.
    """

    module: nn.Module
    entries: Sequence[nn.Module] = ()
    early: Sequence[nn.Module] = ()
    exit: nn.Module | None = None
    location: StateLocation = field(default_factory=StateLocation)


# -- finding them ----------------------------------------------------------------------------------


@dataclass(eq=False)
class _Call:
    """A module that is running, and the parts of it that have run."""

    module: nn.Module
    given: Any
    parts: list[tuple[nn.Module, Any, Any]] = field(default_factory=list)
    """Modules without parts of their own, with what they were given and have returned."""
    early: int | None = None
    """How many of these had run when a state was changed first, if that was the inputs of a
    convolution: what runs before these are known knows no state."""


@contextmanager
def finding_mixers(
    model: nn.Module,
    cache: StateCache,
    known: Mapping[nn.Module, StateLocation],
    found: list[Mixer],
) -> Iterator[None]:
    """Puts the modules that keep states into a list while the block runs a pass over one token.

    known: those that look for them elsewhere than in the cache. The others ask it.
    """
    running: list[_Call] = []
    asking: dict[nn.Module, _Call] = {}

    def enter(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        running.append(_Call(module, _input_of(module.forward, args, options)))

    def leave(module: nn.Module, args: Any, options: Any, output: Any) -> None:
        call = running.pop()
        if module in asking or module in known:
            found.append(_mixer(call, output, known.get(module) or StateLocation()))
        elif next(module.children(), None) is None:
            for outer in running:
                outer.parts.append((module, call.given, output))

    def note(name: StateName, changes: bool) -> None:
        call = running[-1]
        asking[call.module] = call
        if changes and call.early is None:
            call.early = len(call.parts) if name.kind == "conv" else 0

    with ExitStack() as stack:
        for module in model.modules():
            for hook in (
                module.register_forward_pre_hook(enter, with_kwargs=True),
                module.register_forward_hook(leave, with_kwargs=True),
            ):
                stack.callback(hook.remove)
        cache.listener = note
        stack.callback(setattr, cache, "listener", None)
        for location in known.values():
            stack.enter_context(location.watched())
        yield


def _mixer(call: _Call, output: Any, location: StateLocation) -> Mixer:
    own = output[0] if isinstance(output, tuple) else output
    entries = [part for part, given, made in call.parts if given is call.given and made is not own]
    exits = [part for part, _, made in call.parts if made is own]
    stateless = call.parts if location.shifts else call.parts[: call.early or 0]
    early = [part for part, _, _ in stateless if part not in (*entries, *exits)]
    return Mixer(call.module, entries, early, exits[0] if exits else None, location)


def _input_of(forward: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return args[0] if args else options.get(_parameters(forward)[0])


def _parameters(forward: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(forward).parameters) or [""]


# -- running them ----------------------------------------------------------------------------------


@contextmanager
def stepping(mixers: Sequence[Mixer], cache: StateCache, parts: Parts) -> Iterator[None]:
    """Lets mixers read the columns of a pass part by part while the block runs it. The state after
    the last column of each part is kept."""
    with ExitStack() as stack:
        for mixer in mixers:
            if len(parts) > 1 or mixer.location.is_external:
                stepped = StepwiseForward(mixer, cache, parts)
                stack.enter_context(patch_attribute(mixer.module, "forward", stepped))
        yield


class StepwiseForward:
    """Stands for the ``forward`` of a mixer."""

    def __init__(self, mixer: Mixer, cache: StateCache, parts: Parts) -> None:
        self._mixer, self._cache, self._parts = mixer, cache, parts
        self.own: Any = mixer.module.__dict__.get("forward")
        """The module's own ``forward``, if it has one besides that of its class."""
        self._forward: Callable[..., Any] = mixer.module.forward
        self._part: Tensor  # of the input, that is read now
        self._range = (0, 0)
        self._results: list[Tensor] = []  # which await the exit

    @cached_property
    def _names(self) -> list[str]:
        """Looked up where it runs: in most passes our own code computes the mixer."""
        return _parameters(self._forward)

    def __call__(self, *args: Any, **options: Any) -> Any:
        states: Tensor = _input_of(self._forward, args, options)  # [A, T, H]
        given = {**dict(zip(self._names, args, strict=False)), **options}
        if len(self._parts) == 1:
            return self._read(states, given, *self._parts[0])
        self._results = []
        with ExitStack() as stack:
            self._exchange_ends(stack, states, given)
            outputs = [self._read(states, given, begin, end) for begin, end in self._parts]
        leave = self._mixer.exit
        return _joined(outputs, None if leave is None else leave(torch.cat(self._results, 1)))

    def _read(self, states: Tensor, given: dict[str, Any], begin: int, end: int) -> Any:
        """The module's output for some columns."""
        progress = self._cache.progress
        assert progress is not None
        progress.begin, progress.end = begin, end
        self._part, self._range = states[:, begin:end], (begin, end)
        arguments = {self._names[0]: self._part}
        for name, value in given.items():
            arguments.setdefault(name, _columns(name, value, begin, end))
        output = self._mixer.location.read(self._cache, self._forward, arguments)
        if begin < progress.num_committed:
            self._cache.drop_column(begin - 1)
        return output

    def _exchange_ends(self, stack: ExitStack, states: Tensor, given: dict[str, Any]) -> None:
        if self._mixer.early:
            for part, whole in self._run_early(states, given).items():
                early = partial(self._early, whole)
                stack.enter_context(patch_attribute(part, "forward", early))
        for entry in self._mixer.entries:
            precomputed = partial(self._precomputed, entry.forward, entry(states))
            stack.enter_context(patch_attribute(entry, "forward", precomputed))
        if self._mixer.exit is not None:
            stack.enter_context(patch_attribute(self._mixer.exit, "forward", self._await_exit))

    def _run_early(self, states: Tensor, given: dict[str, Any]) -> dict[nn.Module, Tensor]:
        """What the parts that know no state make of all columns: the module is left after the last
        of them, or at the first change of a state."""
        made: dict[nn.Module, Tensor] = {}

        def note(module: nn.Module, args: Any, output: Tensor) -> None:
            made[module] = output
            if len(made) == len(self._mixer.early):
                raise StateWriteBlocked

        with suppress(StateWriteBlocked), ExitStack() as hooks:
            for part in self._mixer.early:
                hooks.enter_context(part.register_forward_hook(note))
            with self._mixer.location.without_states(self._cache, states, given) as arguments:
                self._forward(**arguments)
            raise AssertionError(
                f"{type(self._mixer.module).__name__} did not run all of its parts"
            )
        return made

    def _early(self, whole: Tensor, given: Tensor) -> Tensor:
        begin, end = self._range
        return whole[:, begin:end].contiguous()

    def _precomputed(self, forward: Callable[..., Any], whole: Tensor, given: Tensor) -> Any:
        begin, end = self._range
        return whole[:, begin:end].contiguous() if given is self._part else forward(given)

    def _await_exit(self, result: Tensor) -> Tensor:
        self._results.append(result)
        return result


def _columns(name: str, value: Any, begin: int, end: int) -> Any:
    """The part of an argument that belongs to some columns."""
    if name == "position_ids" and isinstance(value, Tensor):
        return value[..., begin:end]
    if name == "position_embeddings" and isinstance(value, tuple):
        return tuple(angles[:, begin:end] for angles in value)
    return value


def _joined(outputs: Sequence[Any], left: Tensor | None) -> Any:
    """The output for all columns. left: what has left by the exit."""
    if not isinstance(outputs[0], tuple):
        return torch.cat(list(outputs), 1) if left is None else left
    if left is None:
        parts = zip(*outputs, strict=True)
        return tuple(None if part[0] is None else torch.cat(part, 1) for part in parts)
    return (left, *outputs[-1][1:])
