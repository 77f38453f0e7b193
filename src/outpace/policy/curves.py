"""The time of a round of any size, from the sizes that were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

MIN_SAMPLES = 2
"""Measurements that are believed, where one may have been disturbed: of a size, of plain rounds
before the first draft at a batch and context, and of plain rounds that are as much faster than
before as a round of a new size was, which shows that the machine has become faster
(lab/measure/slow_phase.py). With 3 plain rounds replays are .997 times as fast, with 1 .991."""


class Cost(NamedTuple):
    """The median times of one kind of round."""

    levels: int
    """Passes of the drafter."""
    total: float
    draft: float
    measured: int
    """How often."""

    def times(self, factor: float) -> Cost:
        """Returns these times in another unit."""
        return Cost(self.levels, self.total * factor, self.draft * factor, self.measured)


def curve_of(known: Mapping[int, Cost], levels: Sequence[int]) -> list[float] | None:
    """Returns the seconds of a round for each size 0..N, as `CostTable.curve` does.

    known: the measured sizes, with 0; nothing: None is returned. levels: passes of the drafter for
    each size.
    """
    if not known:
        return None
    found = _put_together(known, levels)
    trusted = {n: cost for n, cost in known.items() if cost.measured >= MIN_SAMPLES or not n}
    if 1 < len(trusted) < len(known):
        expected = _put_together(trusted, levels)
        found = [
            seconds if size in trusted else min(seconds, expected[size])
            for size, seconds in enumerate(found)
        ]
    return list(accumulate(found, max))


def _put_together(known: Mapping[int, Cost], levels: Sequence[int]) -> list[float]:
    """The time of a round for each size, interpolated from the measured ones."""
    drafts, rests = _parts(known, max(levels), len(levels))
    found = [drafts[level] + rest for level, rest in zip(levels, rests, strict=False)]
    for size, cost in known.items():
        if size < len(levels) and cost.levels == levels[size]:
            found[size] = cost.total
    plain = known[0].total
    least = [plain, *[plain + drafts[level] for level in levels[1:]]]
    return list(map(max, found, least))


def interpolated(known: Mapping[int, Cost], size: int, levels: int) -> float:
    """Returns the time that the measured sizes predict for one more."""
    drafts, rests = _parts(known, levels, size)
    return drafts[levels] + rests[size]


def _parts(known: Mapping[int, Cost], levels: int, size: int) -> tuple[list[float], list[float]]:
    """The time of drafting 0..levels levels, and of the rest of a round with 0..size nodes."""
    drafts = _line({cost.levels: cost.draft for cost in known.values()}, levels)
    return drafts, _line({each: cost.total - cost.draft for each, cost in known.items()}, size)


def _line(known: Mapping[int, float], last: int) -> list[float]:
    """The values at 0..last: linear between the known ones, of which one is at 0; beyond the last
    of these along the line from the first through it.

    >>> _line({0: 1.0, 2: 2.0, 4: 5.0}, last=6)
    [1.0, 1.5, 2.0, 3.5, 5.0, 6.0, 7.0]
    """
    measured = sorted(known)
    found = [known[0]]
    for low, high in pairwise(measured):
        slope = (known[high] - known[low]) / (high - low)
        found += [known[low] + slope * step for step in range(1, high - low)]
        found.append(known[high])
    farthest = measured[-1]
    slope = (known[farthest] - known[0]) / max(1, farthest)
    found += [known[0] + slope * step for step in range(farthest + 1, last + 1)]
    return found[: last + 1]
