"""Drafters that choose one child for each row by what they have learned from rounds."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Self, TypeVar

from outpace.core.proposal import DraftSampling, Needs
from outpace.core.request import PerRequest, Request
from outpace.draft.base import Setup
from outpace.draft.state import FileName, StateFile
from outpace.methods.choosers.base import Children, rule_of
from outpace.methods.choosers.choosing import DraftersOptions, SelectingDrafter


@dataclass(frozen=True, kw_only=True)
class LearningOptions(DraftersOptions):
    """What a user may set of all of them."""

    state: FileName = None
    """A file in which what is learned is kept between runs."""


State = TypeVar("State")


class LearningSelector(SelectingDrafter, Generic[State]):
    """Keeps what is learned: one state for all rows, one for each reproducible row, and a file
    between runs if the option ``state`` names one."""

    sampling_kinds: frozenset[DraftSampling] = frozenset(
        {DraftSampling.DETERMINISTIC, DraftSampling.IID}
    )
    needs: Needs = Needs(softmax_probs=True)

    def __init__(
        self,
        given: Children,
        first: Callable[[], State],
        path: str | os.PathLike[str] | None,
    ) -> None:
        """first: makes the state before the first round. path: of the file, if there is one."""
        super().__init__(given)
        self.needs = replace(self.needs, softmax_probs=True)
        self.learned = first()
        """What is known of all rows together."""
        self._learned = PerRequest(lambda request: first(), lasting=True, common=self.learned)
        self._file = None if path is None else given.state_file(path, self.name)
        if self._file is not None:
            saved = self._file.load()
            if saved is not None:
                with self._file.read():
                    self.restore(saved)
            self._file.keep(self.to_save)

    @classmethod
    @abstractmethod
    def of(cls, setup: Setup, given: Children) -> Self:
        """Returns the drafter that chooses among these children."""

    @abstractmethod
    def to_save(self) -> Mapping[str, Sequence[float]]:
        """Returns what is known of all rows together, as lists of numbers."""

    @abstractmethod
    def restore(self, saved: Mapping[str, Any]) -> None:
        """Goes on from what `to_save` returned in an earlier run."""

    @classmethod
    def default_rule_for(cls, options: Any) -> str:
        return rule_of(options.drafters)

    @classmethod
    def build(cls, setup: Setup) -> Self:
        return cls.of(setup, Children.of(setup, setup.options.drafters))

    def files(self) -> Iterator[StateFile]:
        yield from super().files()
        if self._file is not None:
            yield self._file

    def end(self, requests: Sequence[Request], interrupted: bool = False) -> None:
        super().end(requests, interrupted)
        if self._file is not None and self.learns and not interrupted:
            self._file.changed()
