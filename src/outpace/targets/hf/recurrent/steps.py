"""Passes of a model with states: which columns are read at once, and which one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from outpace.targets.hf.extra import Extra, Pass
from outpace.targets.hf.recurrent.mixers import Mixer, Parts, finding_mixers, stepping
from outpace.targets.hf.recurrent.own_states import places_of
from outpace.targets.hf.recurrent.states import Name, Reading, StateCache, States, parents_of
from outpace.targets.hf.supported.plainly import some_tokens

Runner = Any
"""What runs a model over rows (`hf.runner`), and these steps among others."""

TRIAL = 16
"""Tokens that a runner holds on which a model is tried out."""
_LOUD, _LOUDER = 8.0, 64.0
_TOLERANCE = 0.05


class Steps(Extra):
    """How the passes of one model with recurrent states read their columns.

    All that may be taken back is read column by column, so that the state behind each is there.
    Committed tokens in front of it are read at once, as transformers reads a prompt.
    """

    reads_padding = False
    prevents_fixed = "goes on from a state"

    def __init__(self, cache: StateCache, another: Callable[[], Runner]) -> None:
        """another: makes a runner of the same model, with one row, to try something out."""
        self._cache, self._another = cache, another
        self._mixers: list[Mixer] = []

    def find_mixers(self, runner: Runner) -> None:
        """Finds the modules that keep a state, by a pass over one token."""
        runner.admit(1)
        found: list[Mixer] = []
        with finding_mixers(runner.model, self._cache, places_of(runner.model), found):
            # With a cache also where it is not told of ours: then it makes states of its own.
            runner.forward(_tokens(runner, 1), keep=1, use_cache=True)
        runner.reset()
        self._mixers = found

    @contextmanager
    def around(self, given: Pass) -> Iterator[None]:
        """Lets the model read a pass while the block runs. Of the columns that are committed,
        whatever the verdict, only the state behind the last is kept."""
        parents = parents_of(given.columns, given.tree)
        self._cache.begin(
            Reading(given.first, given.starts, parents, given.certain, end=given.columns)
        )
        parts = self._parts(given.columns, given.certain, max(given.starts) > 0)
        with stepping(self._mixers, self._cache, parts):
            yield
        self._cache.end()

    def _parts(self, columns: int, certain: int, goes_on: bool) -> Parts:
        at_once = certain if certain > 1 and (not goes_on or self.continues) else 0
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
        at_once, by_steps, other = (_states_of_trial(self._another(), *run) for run in runs)
        return all(
            _near(at_once[name], state)
            and (name.kind != "recurrent" or not torch.equal(at_once[name], other[name]))
            for name, state in by_steps.items()
        )


def _near(state: Tensor, other: Tensor) -> bool:
    return bool((state - other).norm() <= _TOLERANCE * other.norm())


@torch.inference_mode()
def _states_of_trial(runner: Runner, continues: bool, loudness: float) -> dict[Name, Tensor]:
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


def _scaled(states: States, by: float) -> States:
    """The same with other recurrent states: loud inputs of a convolution would drown these."""
    return {
        at: {name: state * (by if name.kind == "recurrent" else 1) for name, state in held.items()}
        for at, held in states.items()
    }


def _tokens(runner: Runner, count: int) -> Tensor:
    return torch.tensor([some_tokens(runner.model, count)], device=runner.device)
