"""How long a round takes, by batch, context and width of the draft: measured, not modelled.

round(B, w) = draft(B, w) + score(B, w + 1 tokens) + everything else

Every round that is played is a measurement. The last few of one batch, context and width are kept,
and their median is used, which single disturbances do not change. Between measured widths the time
is interpolated; beyond the last it is extrapolated from a plain round. Where the machine becomes
slower or faster all at once, because other processes come or go, what was measured before is
forgotten: rounds from before and after must not be compared with each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from statistics import median, median_low
from typing import NamedTuple

from outpace.core.request import Request
from outpace.core.stats import Seconds
from outpace.policy.base import Outcome

KEPT = 15
"""Measurements kept of one kind of round: enough for a median, few enough to follow a machine
whose speed changes."""

CHANGED = 1.25
"""The machine has changed where the last ``RUN`` rounds all took this many times longer, or all so
many times less, than rounds of their kind did before."""

STALE = 192
"""Rounds after which a measurement is left out where there are newer ones of its kind: a machine's
speed drifts, and what is seldom measured would be compared with what is measured all the time."""

ENOUGH = 3
"""Measurements that make a median trustworthy; n are kept, however old."""

DOUBTED = 1.15
"""A median is doubted if the latest measurement is this many times greater or less."""

RUN = 5
"""Rounds. One in six may be held up by another process without being taken for a change."""

MISS = -1
"""Stands for the width of rounds for which a drafter was asked and found nothing."""

SHORTEST_CONTEXT = 512
"""Contexts up to this share a bucket; longer ones have one per doubling."""


@dataclass
class _Cell:
    """The last rounds of one kind, and their medians."""

    levels: int
    seen: deque[Seconds] = field(default_factory=lambda: deque(maxlen=KEPT))
    numbers: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT))
    total: float = 0.0
    draft: float = 0.0
    latest: int = 0

    def add(self, seconds: Seconds, number: int) -> None:
        self.seen.append(seconds)
        self.numbers.append(number)
        while len(self.seen) > ENOUGH and self.numbers[0] < number - STALE:
            self.numbers.popleft()
            self.seen.popleft()
        self._update()

    def forget(self, first: int) -> None:
        """Forgets the rounds before the one of this number."""
        while self.numbers and self.numbers[0] < first:
            self.numbers.popleft()
            self.seen.popleft()
        if self.numbers:
            self._update()

    def _update(self) -> None:
        self.total = median_low(round_.total for round_ in self.seen)
        self.draft = median_low(round_.draft for round_ in self.seen)
        self.latest = self.numbers[-1]


class Place(NamedTuple):
    """The batch and context of a round: rounds of one place and width take equally long."""

    batch: int
    context: int

    @classmethod
    def of(cls, batch: int, context: int) -> Place:
        """Returns the place of a batch whose longest row has this many tokens.

        >>> Place.of(batch=6, context=1000)
        Place(batch=8, context=1024)
        """
        rows = batch if batch <= 4 else _power(batch)
        return cls(rows, max(SHORTEST_CONTEXT, _power(context)))


class CostModel:
    """Medians of measured rounds, and a curve over all widths from those that were measured."""

    def __init__(self) -> None:
        self._cells: dict[Place, dict[int, _Cell]] = {}
        self._widest: dict[Place, int] = {}
        self._ratios: deque[float] = deque(maxlen=RUN)
        self._added = 0
        # What follows from the rounds so far, until the next one is added.
        self._here: dict[Place, dict[int, _Known]] = {}
        self._curves: dict[tuple[Place, tuple[int, ...]], Sequence[float] | None] = {}
        self._earlier: dict[Place, dict[int, _Known]] = {}  # of earlier runs, in plain rounds

    def to_save(self) -> list[list[float]]:
        """Returns what drafts cost in plain rounds, for a later run: batch, context, width, levels,
        the whole round, and drafting. What was not measured in this run is what was restored."""
        now = {place: self._relative(place) for place in self.places}
        known = {**self._earlier, **{place: costs for place, costs in now.items() if costs}}
        return [
            [place.batch, place.context, width, cost.levels, cost.total, cost.draft]
            for place, costs in known.items()
            for width, cost in costs.items()
        ]

    def restore(self, saved: Sequence[Sequence[float]]) -> None:
        """Goes on from what an earlier run saved. Times of this run take its place as they come;
        plain rounds, by which all others are measured, are always those of this run."""
        self._earlier = {}
        self._drop_curves()
        for batch, context, width, levels, total, draft in saved:
            costs = self._earlier.setdefault(Place(int(batch), int(context)), {})
            costs[int(width)] = _Known(int(levels), float(total), float(draft), ENOUGH)

    def add(self, place: Place, width: int, seconds: Seconds, levels: int | None = None) -> None:
        """Adds a round that drafted ``width`` nodes in its widest row.

        levels: passes of the drafter, by default one for each node. What was measured with another
        number of them is forgotten.
        """
        cells = self._cells.setdefault(place, {})
        self._added += 1
        self._drop_curves()
        levels = width if levels is None else levels
        if width not in cells or cells[width].levels != levels:
            cells[width] = _Cell(levels)
        cell = cells[width]
        if len(cell.seen) >= RUN:
            self._ratios.append(seconds.total / cell.total)
        cell.add(seconds, self._added)
        if width >= 0:
            self._widest[place] = max(width, self._widest.get(place, 0))
        if self._has_changed():
            self._forget()

    def add_miss(self, place: Place, seconds: Seconds) -> None:
        """Adds a round for which the drafter was asked and found nothing to propose."""
        self.add(place, MISS, seconds, 0)

    def miss(self, place: Place) -> float:
        """Returns the seconds that asking for nothing adds to a plain round; 0 while unknown."""
        cells = self._cells.get(place, {})
        if MISS not in cells or 0 not in cells:
            return 0.0
        return max(0.0, cells[MISS].total - cells[0].total)

    def _drop_curves(self) -> None:
        self._here.clear()
        self._curves.clear()

    def _has_changed(self) -> bool:
        """Whether the latest rounds were all slower, or all faster, than those before."""
        if len(self._ratios) < RUN:
            return False
        return min(self._ratios) > CHANGED or max(self._ratios) < 1 / CHANGED

    def _forget(self) -> None:
        """Forgets all but the latest rounds."""
        self._ratios.clear()
        for place, cells in self._cells.items():
            for cell in cells.values():
                cell.forget(self._added - RUN + 1)
            self._cells[place] = {width: cell for width, cell in cells.items() if cell.seen}

    def measured(self, place: Place) -> Mapping[int, float]:
        """Returns the median seconds of each measured width, ascending."""
        cells = self._cells.get(place, {})
        return {width: cells[width].total for width in sorted(cells) if width >= 0}

    def times_measured(self, place: Place, width: int) -> int:
        """Returns how many measurements of such rounds are kept."""
        cell = self._cells.get(place, {}).get(width)
        return len(cell.seen) if cell else 0

    def age(self, place: Place, width: int) -> int:
        """Returns how many measurements ago such a round was last measured."""
        cell = self._cells.get(place, {}).get(width)
        return self._added - (cell.latest if cell else 0)

    def is_doubted(self, place: Place, width: int) -> bool:
        """Returns whether such a round has to be measured again soon: there are too few
        measurements, or the latest does not fit the others."""
        cell = self._cells.get(place, {}).get(width)
        if cell is None or len(cell.seen) < ENOUGH:
            return True
        return not 1 / DOUBTED < cell.seen[-1].total / cell.total < DOUBTED

    def split(self, place: Place, width: int) -> Seconds | None:
        """Returns the medians of the parts of such a round, None if there was none."""
        cell = self._cells.get(place, {}).get(width)
        if cell is None:
            return None
        drafts, scores, rests = (
            [getattr(round_, part) for round_ in cell.seen] for part in ("draft", "score", "rest")
        )
        return Seconds(median(drafts), median(scores), median(rests))

    def slopes(self, place: Place, forked: float) -> tuple[float, float] | None:
        """Returns what a level and a node more cost, in plain rounds; None while nothing is known.

        forked: what trees cost over chains, in plain rounds. On a GPU, where the parts cannot be
        told apart, drafting shows what its launching takes.
        """
        cells = self._rounds(place)
        drafting = {width: cell for width, cell in cells.items() if width and cell.levels}
        if 0 not in cells or not drafting:
            return None
        plain = cells[0].total
        level = median(cell.draft / cell.levels for cell in drafting.values())
        node = median(
            (cell.total - cell.draft - plain * (1 + forked * (width > cell.levels))) / width
            for width, cell in drafting.items()
        )
        return level / plain, node / plain

    @property
    def places(self) -> list[Place]:
        return sorted(self._cells)

    def curve(self, place: Place, levels: Sequence[int]) -> Sequence[float] | None:
        """Returns the seconds of a round for each width 0..W, never falling, and never below a
        plain round and what drafting itself took: the machine may have been faster while a draft
        was tried, and drafting must not look free.

        levels: passes of the drafter for each width. What was not measured is put together from
        what the passes of a width take, and the rest of a round with as many nodes. A round that
        was hardly ever measured counts with what the well-known ones make expect, if that is less:
        another process may have held it up, and only what seems to pay is measured again.

        None until both a plain round and a drafting one have been measured, here or, for what a
        drafted token adds, at the nearest other place.
        """
        asked = place, tuple(levels)
        if asked not in self._curves:
            self._curves[asked] = self._curve(place, levels)
        return self._curves[asked]

    def _curve(self, place: Place, levels: Sequence[int]) -> list[float] | None:
        known = self._known(place)
        if not known:
            return None
        trusted = {
            width: cell for width, cell in known.items() if cell.measured >= ENOUGH or not width
        }
        measured = _put_together(known, levels)
        if 1 < len(trusted) < len(known):
            expected = _put_together(trusted, levels)
            measured = [
                seconds if width in trusted else min(seconds, expected[width])
                for width, seconds in enumerate(measured)
            ]
        return list(accumulate(measured, max))

    def widest(self, place: Place) -> int:
        """Returns the greatest width ever measured, here or at the place that `curve` takes
        what drafting adds from."""
        known = self._known(place)
        return max(*known, self._widest.get(place, 0)) if known else 0

    def _rounds(self, place: Place) -> dict[int, _Cell]:
        """What was measured at a place, by width, without the rounds that found nothing."""
        return {width: cell for width, cell in self._cells.get(place, {}).items() if width >= 0}

    def _known(self, place: Place) -> Mapping[int, _Known]:
        """What was measured, by width; beside a plain round what drafting added to one elsewhere,
        if nothing else is known here. Nothing while one of the two is missing."""
        if place not in self._here:
            plain = self._cells.get(place, {}).get(0)
            costs = plain and (self._relative(place) or self._nearest(place))
            self._here[place] = {}
            if plain and costs:
                drafting = {width: costs[width].times(plain.total) for width in sorted(costs)}
                self._here[place] = {0: _Known(0, plain.total, 0.0, len(plain.seen)), **drafting}
        return self._here[place]

    def _relative(self, place: Place) -> dict[int, _Known]:
        """What drafts were measured to take at a place, by width, in its plain rounds."""
        cells = self._rounds(place)
        if 0 not in cells:
            return {}
        plain = cells[0].total
        return {
            width: _Known(cell.levels, cell.total / plain, cell.draft / plain, len(cell.seen))
            for width, cell in cells.items()
            if width
        }

    def _nearest(self, place: Place) -> dict[int, _Known]:
        """The same of the nearest other context, or of an earlier run if there is none."""
        here = {other: self._relative(other) for other in self._cells}
        for known in (here, self._earlier):
            others = [
                (abs(other.context - place.context), other)
                for other, costs in known.items()
                if costs and other.batch == place.batch
            ]
            if others:
                return known[min(others)[1]]
        return {}


class _Known(NamedTuple):
    """The median times of a round's parts."""

    levels: int
    total: float
    draft: float
    measured: int
    """How often."""

    def times(self, factor: float) -> _Known:
        """Returns these times in another unit."""
        return _Known(self.levels, self.total * factor, self.draft * factor, self.measured)


def _put_together(known: Mapping[int, _Known], levels: Sequence[int]) -> list[float]:
    """The time of a round for each width, from the measured ones."""
    drafts = _line({cell.levels: cell.draft for cell in known.values()}, max(levels))
    rests = _line({width: cell.total - cell.draft for width, cell in known.items()}, len(levels))
    found = [drafts[level] + rest for level, rest in zip(levels, rests, strict=False)]
    for width, cell in known.items():
        if width < len(levels) and cell.levels == levels[width]:
            found[width] = cell.total
    plain = known[0].total
    least = [plain, *[plain + drafts[level] for level in levels[1:]]]
    return list(map(max, found, least))


def _line(known: Mapping[int, float], last: int) -> list[float]:
    """The values at 0..last: linear between the known ones, of which one is at 0; beyond the last
    of these along the line from the first through it.

    >>> _line({0: 1.0, 2: 2.0, 4: 5.0}, last=6)
    [1.0, 1.5, 2.0, 3.5, 5.0, 6.0, 7.0]
    """
    places = sorted(known)
    found = [known[0]]
    for low, high in pairwise(places):
        slope = (known[high] - known[low]) / (high - low)
        found += [known[low] + slope * step for step in range(1, high - low)]
        found.append(known[high])
    farthest = places[-1]
    slope = (known[farthest] - known[0]) / max(1, farthest)
    found += [known[0] + slope * place for place in range(farthest + 1, last + 1)]
    return found[: last + 1]


def _power(count: int) -> int:
    """The power of two that is at least ``count``."""
    return 1 << max(0, count - 1).bit_length()


def place_before(requests: Sequence[Request], outcomes: Sequence[Outcome]) -> Place:
    """Returns the batch and context of a round that has just ended: its tokens are already in the
    requests."""
    pairs = zip(requests, outcomes, strict=True)
    return Place.of(len(requests), max(row.length - outcome.emitted for row, outcome in pairs))
