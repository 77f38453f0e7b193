"""What a round costs by the clock.

round(B, w) = draft(B, w) + score(B, w + 1 tokens) + everything else

Every round that is played is a measurement. `CostTable` keeps the last few of one batch, context,
drafter and width and uses their median, which single disturbances do not change. Between measured
widths it interpolates; beyond the last one it extrapolates from a plain round. Where the machine
becomes slower or faster all at once, because other processes come or go, it forgets what was
measured before: rounds from before and after must not be compared with each other. A round of a new
width that is faster than expected asks for plain rounds, which tell a cheap width from a faster
machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from statistics import median, median_low
from typing import Any, NamedTuple

from outpace.core.stats import Seconds

ENOUGH = 2
"""Measurements that are believed, where one may have been disturbed: of a width, of plain rounds
before the first draft at a batch and context, and of plain rounds that are as much faster than
before as a round of a new width was, which shows that the machine has become faster
(lab/measure/slow_phase.py). With 3 plain rounds replays are .997 times as fast, with 1 .991."""

CHANGED, RUN = 1.25, 5
"""The machine has changed where the last ``RUN`` rounds all took ``CHANGED`` times longer, or all
that much less, than rounds of their kind did before. One round in six may be held up by another
process without being taken for a change (tests/policy/test_busy_machine.py)."""

KEPT = 3 * RUN
"""Measurements kept of one kind of round: enough for a median, few enough to follow a machine whose
speed changes (tests/policy/test_busy_machine.py). After as many rounds other decisions that follow
from measurements are made anew: what a tree looks like, that nothing pays, and which of two close
candidates is better. With 2 * RUN replays are .993 times as fast, editing .967."""

PLAIN, MISS = 0, -1
"""Widths of rounds that draft nothing: because nothing was asked for, and because the drafter was
asked and found nothing."""

SHORTEST_CONTEXT = 512
"""Contexts up to this length share a bucket; longer ones have one per doubling. With 128 replays
are .978 times as fast."""


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


def _power(count: int) -> int:
    """The power of two that is at least ``count``."""
    return 1 << max(0, count - 1).bit_length()


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


@dataclass
class _Cell:
    """The last rounds of one kind, by their number, and their medians."""

    levels: int
    seen: deque[tuple[int, Seconds]] = field(default_factory=lambda: deque(maxlen=KEPT))
    cost: Cost = field(init=False)

    def add(self, seconds: Seconds, number: int) -> None:
        self.seen.append((number, seconds))
        self._update()

    def forget(self, first: int) -> None:
        """Forgets the rounds before the one of this number."""
        while self.seen and self.seen[0][0] < first:
            self.seen.popleft()
        if self.seen:
            self._update()

    def _update(self) -> None:
        total = median_low(seconds.total for _, seconds in self.seen)
        draft = median_low(seconds.draft for _, seconds in self.seen)
        self.cost = Cost(self.levels, total, draft, len(self.seen))


@dataclass
class _Doubt:
    """Whether the machine has become faster."""

    since: int
    """The number of the round that was faster than expected."""
    confirmed: int = 0
    """Plain rounds since then that were, too."""
    refuted: int = 0
    """Plain rounds since then that were not: one may have been held up."""


class CostTable:
    """The measured cost of rounds, by place, drafter and width. All drafters share plain rounds."""

    def __init__(self) -> None:
        self._cells: dict[Place, dict[tuple[str, int], _Cell]] = {}
        self._ratios: deque[float] = deque(maxlen=RUN)
        self._added = 0
        self._doubts: dict[Place, _Doubt] = {}
        self.changes = 0
        """How often the machine became faster or slower, so that measurements were forgotten."""
        self._reading: dict[str, deque[float]] = {}  # seconds for each token, by drafter
        # Costs of earlier runs, in plain rounds, by drafter.
        self._earlier: dict[str, dict[Place, dict[int, Cost]]] = {}
        self._earlier_reading: dict[str, float] = {}
        # What follows from the rounds so far, until one changes a median.
        self._curves: dict[tuple[Place, str, tuple[int, ...]], Sequence[float] | None] = {}
        self._known_here: dict[tuple[Place, str], Mapping[int, Cost]] = {}

    # -- learning ------------------------------------------------------------------------------

    def add(
        self, place: Place, name: str, width: int, seconds: Seconds, levels: int | None = None
    ) -> None:
        """Adds a round that drafted ``width`` nodes in its widest row. name: the drafter's; plain
        rounds are shared by all drafters.

        levels: passes of the drafter, by default one for each node. Measurements of this width with
        another number of passes are forgotten.
        """
        cells = self._cells.setdefault(place, {})
        kind = (name if width else "", width)
        levels = max(width, 0) if levels is None else levels
        self._added += 1
        before = self.of(place, name, width)
        self._doubt(place, name, width, levels, seconds.total, before)
        if kind not in cells or cells[kind].levels != levels:
            cells[kind] = _Cell(levels)
        cell = cells[kind]
        if len(cell.seen) >= RUN:
            self._ratios.append(seconds.total / cell.cost.total)
        cell.add(seconds, self._added)
        if cell.cost != before:
            self._curves.clear()
            self._known_here.clear()
        low, high = min(self._ratios, default=1.0), max(self._ratios, default=1.0)
        doubt = self._doubts.get(place)
        if doubt is not None and doubt.refuted == ENOUGH:
            del self._doubts[place]
        if doubt is not None and doubt.confirmed == ENOUGH:
            self._forget(doubt.since)
        elif len(self._ratios) == RUN and (low > CHANGED or high < 1 / CHANGED):
            self._forget(self._added - RUN + 1)

    def _doubt(
        self, place: Place, name: str, width: int, levels: int, total: float, cost: Cost | None
    ) -> None:
        """Compares a round with what was expected of it, before it is added. cost: the median of
        rounds of its kind so far.

        A round of a new width has no rounds of its kind to be compared with. Were the machine's
        speed to change together with the width, all that was measured before would make the new
        width look cheap, and nothing would contradict that.
        """
        if width == PLAIN and place in self._doubts and cost is not None:
            if total < cost.total / CHANGED:
                self._doubts[place].confirmed += 1
            else:
                self._doubts[place].refuted += 1
        elif width > 0 and (cost is None or cost.measured < ENOUGH or cost.levels != levels):
            known = self._known(place, name)
            if known and total < _expected(known, width, levels) / CHANGED:
                self._doubts.setdefault(place, _Doubt(self._added))

    def doubted(self, place: Place) -> bool:
        """Returns whether the machine may have become faster: plain rounds will show it."""
        return place in self._doubts

    def _forget(self, first: int) -> None:
        """Forgets the rounds before the one of this number."""
        self.changes += 1
        self._ratios.clear()
        self._doubts.clear()
        self._reading.clear()
        self._curves.clear()
        self._known_here.clear()
        for place, cells in self._cells.items():
            for cell in cells.values():
                cell.forget(first)
            self._cells[place] = {kind: cell for kind, cell in cells.items() if cell.seen}

    def add_reading(self, name: str, seconds: float, tokens: int) -> None:
        """Adds what it took a drafter to read tokens that it had not seen: of a prompt, or of what
        was generated without it."""
        seen = self._reading.setdefault(name, deque(maxlen=KEPT))
        seen.append(max(0.0, seconds) / tokens)

    # -- looking up ----------------------------------------------------------------------------

    @property
    def places(self) -> list[Place]:
        """Where anything was measured."""
        return sorted(self._cells)

    def of(self, place: Place, name: str, width: int) -> Cost | None:
        """Returns the cost of one kind of round, None where there was none."""
        cell = self._cells.get(place, {}).get((name if width else "", width))
        return None if cell is None else cell.cost

    def plain(self, place: Place) -> float | None:
        """Returns the seconds of a plain round."""
        cost = self.of(place, "", PLAIN)
        return None if cost is None else cost.total

    def times_measured(self, place: Place, name: str, width: int) -> int:
        """Returns how many measurements of such rounds are kept."""
        cost = self.of(place, name, width)
        return 0 if cost is None else cost.measured

    def age(self, place: Place, name: str, width: int) -> int:
        """Returns how many rounds ago such a round was last measured."""
        cell = self._cells.get(place, {}).get((name if width else "", width))
        return self._added - (cell.seen[-1][0] if cell else 0)

    def miss(self, place: Place, name: str) -> float:
        """Returns the seconds that asking for nothing adds to a plain round; 0 while unknown."""
        miss, plain = self.of(place, name, MISS), self.plain(place)
        return 0.0 if miss is None or plain is None else max(0.0, miss.total - plain)

    def reading(self, name: str, tokens: int, plain: float) -> float:
        """Returns the seconds that reading takes; 0 while nothing is known. plain: of a plain
        round."""
        seen = self._reading.get(name)
        each = median_low(seen) if seen else self._earlier_reading.get(name, 0.0) * plain
        return tokens * each

    def slopes(self, place: Place, name: str, forked: float) -> tuple[float, float] | None:
        """Returns what a level and a node more cost, in plain rounds; None while nothing is known.

        forked: what a tree costs more than a chain, in plain rounds. A GPU computes after the host
        has gone on, so there the time of drafting is that of launching its kernels.
        """
        plain = self.plain(place)
        drafting = {w: cost for w, cost in self._measured(place, name).items() if cost.levels}
        if plain is None or not drafting:
            return None
        level = median(cost.draft / cost.levels for cost in drafting.values())
        node = median(
            (cost.total - cost.draft - plain * (1 + forked * (width > cost.levels))) / width
            for width, cost in drafting.items()
        )
        return level / plain, node / plain

    def curve(self, place: Place, name: str, levels: Sequence[int]) -> Sequence[float] | None:
        """Returns the seconds of a round for each width 0..W of one drafter, never falling, and
        never below a plain round plus the time of drafting itself: the machine may have been faster
        while a draft was tried, and drafting must not look free.

        levels: passes of the drafter for each width. A width that was not measured is the sum of
        two interpolated times: that of its passes of the drafter, and that of the rest of a round
        with as many nodes. A width with fewer than ``ENOUGH`` measurements counts as no more
        than the other widths predict for it: another process may have held it up, and a width that
        looks too slow would never be measured again.

        None until a plain round was measured at this place, and a drafting one at this or another
        place.
        """
        asked = place, name, tuple(levels)
        if asked not in self._curves:
            self._curves[asked] = self._curve(self._known(place, name), levels)
        return self._curves[asked]

    @staticmethod
    def _curve(known: Mapping[int, Cost], levels: Sequence[int]) -> list[float] | None:
        if not known:
            return None
        found = _put_together(known, levels)
        trusted = {w: cost for w, cost in known.items() if cost.measured >= ENOUGH or not w}
        if 1 < len(trusted) < len(known):
            expected = _put_together(trusted, levels)
            found = [
                seconds if width in trusted else min(seconds, expected[width])
                for width, seconds in enumerate(found)
            ]
        return list(accumulate(found, max))

    def _known(self, place: Place, name: str) -> Mapping[int, Cost]:
        """A plain round and drafts by width, with what drafting added elsewhere if it was not
        measured here. Empty while one of the two is missing."""
        if (place, name) not in self._known_here:
            found: dict[int, Cost] = {}
            plain = self.of(place, "", PLAIN)
            costs = plain and (self._measured(place, name) or self._nearest(place, name, plain))
            if plain and costs:
                found = {0: Cost(0, plain.total, 0.0, plain.measured)}
                found |= {width: costs[width] for width in sorted(costs)}
            self._known_here[place, name] = found
        return self._known_here[place, name]

    def _measured(self, place: Place, name: str) -> dict[int, Cost]:
        """What drafts of one drafter were measured to take at a place, by width."""
        cells = self._cells.get(place, {}).items()
        return {width: cell.cost for (of, width), cell in cells if of == name and width > 0}

    def _relative(self, name: str) -> dict[Place, dict[int, Cost]]:
        """What drafts of one drafter take in this run, in plain rounds."""
        found = {}
        for place in self._cells:
            plain, costs = self.plain(place), self._measured(place, name)
            if plain is not None and costs:
                found[place] = {width: cost.times(1 / plain) for width, cost in costs.items()}
        return found

    def _nearest(self, place: Place, name: str, plain: Cost) -> dict[int, Cost]:
        """What drafts take at the nearest other context, or took in an earlier run."""
        for known in (self._relative(name), self._earlier.get(name, {})):
            others = [
                (abs(other.context - place.context), other)
                for other in known
                if other.batch == place.batch
            ]
            if others:
                costs = known[min(others)[1]]
                return {width: cost.times(plain.total) for width, cost in costs.items()}
        return {}

    # -- between runs --------------------------------------------------------------------------

    def to_dict(self, names: Sequence[str]) -> dict[str, Any]:
        """Returns what drafts and reading cost these drafters, in plain rounds, for a later run.
        What was not measured in this run is what the last one said."""
        plain = next(filter(None, map(self.plain, self.places)), None)
        found = {}
        for name in names:
            known = {**self._earlier.get(name, {}), **self._relative(name)}
            seen = self._reading.get(name)
            earlier = self._earlier_reading.get(name, 0.0)
            found[name] = {
                "costs": [
                    [*place, width, cost.levels, cost.total, cost.draft]
                    for place, costs in known.items()
                    for width, cost in costs.items()
                ],
                "reading": median_low(seen) / plain if seen and plain else earlier,
            }
        return found

    def from_dict(self, saved: Mapping[str, Any], names: Sequence[str]) -> None:
        """Goes on from what an earlier run saved. Times of this run take its place as they come;
        plain rounds, by which all others are measured, are always those of this run."""
        self._curves.clear()
        self._known_here.clear()
        for name in names:
            costs: dict[Place, dict[int, Cost]] = {}
            for batch, context, width, levels, total, draft in saved[name]["costs"]:
                at = costs.setdefault(Place(int(batch), int(context)), {})
                at[int(width)] = Cost(int(levels), float(total), float(draft), ENOUGH)
            self._earlier[name] = costs
            self._earlier_reading[name] = float(saved[name]["reading"])


def _put_together(known: Mapping[int, Cost], levels: Sequence[int]) -> list[float]:
    """The time of a round for each width, interpolated from the measured ones."""
    drafts, rests = _parts(known, max(levels), len(levels))
    found = [drafts[level] + rest for level, rest in zip(levels, rests, strict=False)]
    for width, cost in known.items():
        if width < len(levels) and cost.levels == levels[width]:
            found[width] = cost.total
    plain = known[0].total
    least = [plain, *[plain + drafts[level] for level in levels[1:]]]
    return list(map(max, found, least))


def _expected(known: Mapping[int, Cost], width: int, levels: int) -> float:
    """The time that the measured widths predict for one more."""
    drafts, rests = _parts(known, levels, width)
    return drafts[levels] + rests[width]


def _parts(known: Mapping[int, Cost], levels: int, width: int) -> tuple[list[float], list[float]]:
    """The time of drafting 0..levels levels, and of the rest of a round with 0..width nodes."""
    drafts = _line({cost.levels: cost.draft for cost in known.values()}, levels)
    return drafts, _line({each: cost.total - cost.draft for each, cost in known.items()}, width)


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
