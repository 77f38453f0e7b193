"""Drafters that choose one child for each row by what they have learned from rounds."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Self, TypeVar

from outpace.core.proposal import Drawn, Needs
from outpace.core.request import PerRequest, Request
from outpace.draft.base import Drafter, Setup
from outpace.draft.fingerprint import digest_of
from outpace.draft.state import FileName, StateFile
from outpace.methods.choosers.base import build_children, described, names_of, rule_of
from outpace.methods.choosers.choosing import Choosing, DraftersOptions


@dataclass(frozen=True, kw_only=True)
class LearningOptions(DraftersOptions):
    """What a user may set of all of them."""

    state: FileName = None
    """A file in which what is learned is kept between runs."""


State = TypeVar("State")


class Learning(Choosing, Generic[State]):
    """Keeps what is learned, once for all rows and apart for `Request.reproducible` ones, and in a
    file between runs if the option ``state`` names one."""

    draws: frozenset[Drawn] = frozenset({Drawn.DETERMINISTIC, Drawn.IID})
    needs: Needs = Needs(probs=True)

    def __init__(
        self,
        children: Sequence[Drafter],
        names: Sequence[str],
        vocabulary: int,
        first: Callable[[], State],
        file: Any,
    ) -> None:
        """first: makes what is known before the first round. file: where it is kept, or None."""
        super().__init__(children, names, vocabulary)
        self.needs = replace(self.needs, probs=True)
        self.learned = first()
        """What is known of all rows together."""
        self._learned = PerRequest(lambda request: first(), lasting=True, common=self.learned)
        whose = list(map(described, names, children))
        models = [digest_of(child.loaded.model) for child in children if child.loaded]
        self._file = None if file is None else StateFile(file, self.name, whose, models)
        if self._file is not None:
            saved = self._file.load()
            if saved is not None:
                self.restore(saved)
            self._file.keep(self.to_save)

    @classmethod
    @abstractmethod
    def of(cls, setup: Setup, children: Sequence[Drafter], names: Sequence[str]) -> Self:
        """Returns the drafter that chooses among these children."""

    @abstractmethod
    def to_save(self) -> Mapping[str, Sequence[float]]:
        """Returns what is known of all rows together, as lists of numbers."""

    @abstractmethod
    def restore(self, saved: Mapping[str, Any]) -> None:
        """Goes on from what `to_save` returned in an earlier run."""

    @classmethod
    def usual_rule(cls, options: Any) -> str:
        return rule_of(options.drafters)

    @classmethod
    def build(cls, setup: Setup) -> Self:
        configs = list(setup.options.drafters)
        return cls.of(setup, build_children(setup, configs), names_of(configs))

    def files(self) -> Iterator[StateFile]:
        yield from super().files()
        if self._file is not None:
            yield self._file

    def end(self, requests: Sequence[Request], interrupted: bool = False) -> None:
        super().end(requests, interrupted)
        if self._file is not None and not interrupted:
            self._file.changed()
