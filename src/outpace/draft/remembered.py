"""What a drafter has learned of single texts, which outlives their stay in the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from outpace.draft.base import RowInfo

KEPT = 4096
"""Texts outside the batch whose values are kept: whether one of them has ended or only waits to
join again is not known here."""

State = TypeVar("State")


class Remembered(Generic[State]):
    """A value for each text of the batch, by its row.

    A text that was put aside, or whose step was interrupted, finds its value again when it joins
    the batch anew. So what it drafts is the same as if it had stayed.

    >>> drafts = Remembered(list)
    >>> drafts.admit([RowInfo(id=7, prompt=[1]), RowInfo(id=8, prompt=[2])])
    >>> drafts[0].append("a draft")
    >>> drafts.retain([1])
    >>> drafts.admit([RowInfo(id=7, prompt=[1, 3])])
    >>> drafts[0], drafts[1]
    ([], ['a draft'])
    """

    def __init__(self, first: Callable[[], State]) -> None:
        """first: makes the value of a new text, when somebody asks for it."""
        self._first = first
        self._ids: list[int] = []  # by row
        self._values: dict[int, State] = {}  # by id, of the batch
        self._left: dict[int, State] = {}  # by id, of those outside it, the latest ones last

    def __len__(self) -> int:
        return len(self._ids)

    def admit(self, rows: Sequence[RowInfo]) -> None:
        """Adds rows, as `Drafter.admit` does."""
        for info in rows:
            self._ids.append(info.id)
            if info.id in self._left:
                self._values[info.id] = self._left.pop(info.id)

    def retain(self, rows: Sequence[int]) -> None:
        """Keeps these rows, as `Drafter.retain` does."""
        self._ids = [self._ids[row] for row in rows]
        staying = set(self._ids)
        for left in [known for known in self._values if known not in staying]:
            self._left[left] = self._values.pop(left)
        for oldest in list(self._left)[: max(0, len(self._left) - KEPT)]:
            del self._left[oldest]

    def left(self, known: int) -> State | None:
        """Returns the value of a text outside the batch, by its id; None where none is kept."""
        return self._left.get(known)

    def __getitem__(self, row: int) -> State:
        known = self._ids[row]
        if known not in self._values:
            self._values[known] = self._first()
        return self._values[known]

    def __setitem__(self, row: int, value: State) -> None:
        self._values[self._ids[row]] = value
