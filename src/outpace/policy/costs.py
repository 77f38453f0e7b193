"""Measured times of rounds, by batch, context, drafter and draft size.

round(B, n) = draft(B, n) + score(B, n + 1 tokens) + everything else

Every round that is run is a measurement. `CostTable` keeps the last few of one batch, context,
drafter and size and uses their median, which single disturbances do not change. Between measured
sizes it interpolates; beyond the last one it extrapolates from a plain round. Where the machine
becomes slower or faster all at once, because other processes come or go, it forgets what was
measured before: rounds from before and after must not be compared with each other. A round of a new
size that is faster than expected asks for plain rounds, which tell a cheap size from a faster
machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import Any, NamedTuple

from outpace.core.stats import Seconds
from outpace.core.transfer import power_of_two
from outpace.policy.curves import MIN_SAMPLES, Cost, curve_of, interpolated

SPEED_CHANGE_RATIO, SPEED_CHANGE_ROUNDS = 1.25, 5
"""The machine has changed where the last ``SPEED_CHANGE_ROUNDS`` rounds all took
``SPEED_CHANGE_RATIO`` times longer, or all that much less, than rounds of their kind did before.
One round in six may be held up by another process without being taken for a change
(tests/policy/test_busy_machine.py)."""

MAX_SAMPLES = 3 * SPEED_CHANGE_ROUNDS
"""Measurements kept of one kind of round: enough for a median, few enough to follow a machine whose
speed changes (tests/policy/test_busy_machine.py). After as many rounds other decisions that follow
from measurements are made anew: what a tree looks like, that nothing pays, and which of two close
candidates is better. With 2 * SPEED_CHANGE_ROUNDS replays are .993 times as fast, editing .967."""

PLAIN, MISS = 0, -1
"""Sizes of rounds that draft nothing: because nothing was asked for, and because the drafter was
asked and found nothing."""

SHORTEST_CONTEXT = 512
"""Contexts up to this length share a bucket; longer ones have one per doubling. With 128 replays
are .978 times as fast."""


class BatchBucket(NamedTuple):
    """The batch and context of a round: rounds of one bucket and size take equally long."""

    batch: int
    context: int

    @classmethod
    def of(cls, batch: int, context: int) -> BatchBucket:
        """Returns the bucket of a batch whose longest row has this many tokens.

        >>> BatchBucket.of(batch=6, context=1000)
        BatchBucket(batch=8, context=1024)
        """
        rows = batch if batch <= 4 else power_of_two(batch)
        return cls(rows, max(SHORTEST_CONTEXT, power_of_two(context)))


@dataclass
class _Cell:
    """The last rounds of one kind, by their number, and their medians."""

    levels: int
    seen: deque[tuple[int, Seconds]] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
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
    """The measured cost of rounds, by bucket, drafter and size. All drafters share plain rounds."""

    def __init__(self) -> None:
        self._cells: dict[BatchBucket, dict[tuple[str, int], _Cell]] = {}
        self._ratios: deque[float] = deque(maxlen=SPEED_CHANGE_ROUNDS)
        self._added = 0
        self._doubts: dict[BatchBucket, _Doubt] = {}
        self.changes = 0
        """How often the machine became faster or slower, so that measurements were forgotten."""
        self._reading: dict[str, deque[float]] = {}  # seconds for each token, by drafter
        # Costs of earlier runs, in plain rounds, by drafter.
        self._earlier: dict[str, dict[BatchBucket, dict[int, Cost]]] = {}
        self._earlier_reading: dict[str, float] = {}
        # What follows from the rounds so far, until one changes a median.
        self._curves: dict[tuple[BatchBucket, str, tuple[int, ...]], Sequence[float] | None] = {}
        self._known_here: dict[tuple[BatchBucket, str], Mapping[int, Cost]] = {}

    # -- learning ------------------------------------------------------------------------------

    def add(
        self, bucket: BatchBucket, name: str, size: int, seconds: Seconds, levels: int | None = None
    ) -> None:
        """Adds a round that drafted ``size`` nodes in the row with most. name: the drafter's;
        plain rounds are shared by all drafters.

        levels: passes of the drafter, by default one for each node. Measurements of this size with
        another number of passes are forgotten.
        """
        cells = self._cells.setdefault(bucket, {})
        kind = (name if size else "", size)
        levels = max(size, 0) if levels is None else levels
        self._added += 1
        before = self.of(bucket, name, size)
        self._doubt(bucket, name, size, levels, seconds.total, before)
        if kind not in cells or cells[kind].levels != levels:
            cells[kind] = _Cell(levels)
        cell = cells[kind]
        if len(cell.seen) >= SPEED_CHANGE_ROUNDS:
            self._ratios.append(seconds.total / cell.cost.total)
        cell.add(seconds, self._added)
        if cell.cost != before:
            self._curves.clear()
            self._known_here.clear()
        low, high = min(self._ratios, default=1.0), max(self._ratios, default=1.0)
        doubt = self._doubts.get(bucket)
        if doubt is not None and doubt.refuted == MIN_SAMPLES:
            del self._doubts[bucket]
        if doubt is not None and doubt.confirmed == MIN_SAMPLES:
            self._forget(doubt.since)
        elif len(self._ratios) == SPEED_CHANGE_ROUNDS and (
            low > SPEED_CHANGE_RATIO or high < 1 / SPEED_CHANGE_RATIO
        ):
            self._forget(self._added - SPEED_CHANGE_ROUNDS + 1)

    def _doubt(
        self,
        bucket: BatchBucket,
        name: str,
        size: int,
        levels: int,
        total: float,
        cost: Cost | None,
    ) -> None:
        """Compares a round with what was expected of it, before it is added. cost: the median of
        rounds of its kind so far.

        A round of a new size has no rounds of its kind to be compared with. Were the machine's
        speed to change together with the size, all that was measured before would make the new
        size look cheap, and nothing would contradict that.
        """
        if size == PLAIN and bucket in self._doubts and cost is not None:
            if total < cost.total / SPEED_CHANGE_RATIO:
                self._doubts[bucket].confirmed += 1
            else:
                self._doubts[bucket].refuted += 1
        elif size > 0 and (cost is None or cost.measured < MIN_SAMPLES or cost.levels != levels):
            known = self._known(bucket, name)
            if known and total < interpolated(known, size, levels) / SPEED_CHANGE_RATIO:
                self._doubts.setdefault(bucket, _Doubt(self._added))

    def doubted(self, bucket: BatchBucket) -> bool:
        """Returns whether the machine may have become faster: plain rounds will show it."""
        return bucket in self._doubts

    def _forget(self, first: int) -> None:
        """Forgets the rounds before the one of this number."""
        self.changes += 1
        plain = self._plain_before(first)
        if plain is not None:  # until it is measured again
            seen = self._reading.items()
            self._earlier_reading |= {name: median_low(each) / plain for name, each in seen}
        self._ratios.clear()
        self._doubts.clear()
        self._reading.clear()
        self._curves.clear()
        self._known_here.clear()
        for bucket, cells in self._cells.items():
            for cell in cells.values():
                cell.forget(first)
            self._cells[bucket] = {kind: cell for kind, cell in cells.items() if cell.seen}

    def _plain_before(self, first: int) -> float | None:
        """The seconds of a plain round before the round of this number, in the first bucket that
        has had one."""
        for bucket in self.buckets:
            cell = self._cells[bucket].get(("", PLAIN))
            seen = [] if cell is None else [s.total for number, s in cell.seen if number < first]
            if seen:
                return median_low(seen)
        return None

    def add_prefill(self, name: str, seconds: float, tokens: int) -> None:
        """Adds what it took a drafter to read tokens that it had not seen: of a prompt, or of what
        was generated without it."""
        seen = self._reading.setdefault(name, deque(maxlen=MAX_SAMPLES))
        seen.append(max(0.0, seconds) / tokens)

    # -- looking up ----------------------------------------------------------------------------

    @property
    def buckets(self) -> list[BatchBucket]:
        """Where anything was measured."""
        return sorted(self._cells)

    def of(self, bucket: BatchBucket, name: str, size: int) -> Cost | None:
        """Returns the cost of one kind of round, None where there was none."""
        cell = self._cells.get(bucket, {}).get((name if size else "", size))
        return None if cell is None else cell.cost

    def plain(self, bucket: BatchBucket) -> float | None:
        """Returns the seconds of a plain round."""
        cost = self.of(bucket, "", PLAIN)
        return None if cost is None else cost.total

    def times_measured(self, bucket: BatchBucket, name: str, size: int) -> int:
        """Returns how many measurements of such rounds are kept."""
        cost = self.of(bucket, name, size)
        return 0 if cost is None else cost.measured

    def age(self, bucket: BatchBucket, name: str, size: int) -> int:
        """Returns how many rounds ago such a round was last measured."""
        cell = self._cells.get(bucket, {}).get((name if size else "", size))
        return self._added - (cell.seen[-1][0] if cell else 0)

    def miss(self, bucket: BatchBucket, name: str) -> float:
        """Returns the seconds that asking for nothing adds to a plain round; 0 while unknown."""
        miss, plain = self.of(bucket, name, MISS), self.plain(bucket)
        return 0.0 if miss is None or plain is None else max(0.0, miss.total - plain)

    def prefill_seconds(self, name: str, tokens: int, plain: float) -> float:
        """Returns the seconds that reading takes; 0 while nothing is known. plain: of a plain
        round."""
        seen = self._reading.get(name)
        each = median_low(seen) if seen else self._earlier_reading.get(name, 0.0) * plain
        return tokens * each

    def marginal_costs(
        self, bucket: BatchBucket, name: str, forked: float
    ) -> tuple[float, float] | None:
        """Returns what a level and a node more cost, in plain rounds; None while nothing is known.

        forked: what a tree costs more than a chain, in plain rounds. A GPU computes after the host
        has gone on, so there the time of drafting is that of launching its kernels.
        """
        plain = self.plain(bucket)
        drafting = {n: cost for n, cost in self._measured(bucket, name).items() if cost.levels}
        if plain is None or not drafting:
            return None
        level = median(cost.draft / cost.levels for cost in drafting.values())
        node = median(
            (cost.total - cost.draft - plain * (1 + forked * (size > cost.levels))) / size
            for size, cost in drafting.items()
        )
        return level / plain, node / plain

    def curve(
        self, bucket: BatchBucket, name: str, levels: Sequence[int]
    ) -> Sequence[float] | None:
        """Returns the seconds of a round for each size 0..N of one drafter, never falling, and
        never below a plain round plus the time of drafting itself: the machine may have been faster
        while a draft was tried, and drafting must not look free.

        levels: passes of the drafter for each size. The time of a size that was not measured is the
        sum of two interpolated times: that of its passes of the drafter, and that of the rest of a
        round with as many nodes. A size with fewer than ``MIN_SAMPLES`` measurements counts as no
        more than the other sizes predict for it: another process may have held it up, and a size
        that looks too slow would never be measured again.

        None until a plain round was measured in this bucket, and a drafting one in this or another
        bucket.
        """
        asked = bucket, name, tuple(levels)
        if asked not in self._curves:
            self._curves[asked] = curve_of(self._known(bucket, name), levels)
        return self._curves[asked]

    def _known(self, bucket: BatchBucket, name: str) -> Mapping[int, Cost]:
        """A plain round and drafts by size, with what drafting added elsewhere if it was not
        measured here. Empty while one of the two is missing."""
        if (bucket, name) not in self._known_here:
            found: dict[int, Cost] = {}
            plain = self.of(bucket, "", PLAIN)
            costs = plain and (self._measured(bucket, name) or self._nearest(bucket, name, plain))
            if plain and costs:
                found = {0: Cost(0, plain.total, 0.0, plain.measured)}
                found |= {size: costs[size] for size in sorted(costs)}
            self._known_here[bucket, name] = found
        return self._known_here[bucket, name]

    def _measured(self, bucket: BatchBucket, name: str) -> dict[int, Cost]:
        """What drafts of one drafter were measured to take in a bucket, by size."""
        cells = self._cells.get(bucket, {}).items()
        return {size: cell.cost for (of, size), cell in cells if of == name and size > 0}

    def _relative(self, name: str) -> dict[BatchBucket, dict[int, Cost]]:
        """What drafts of one drafter take in this run, in plain rounds."""
        found = {}
        for bucket in self._cells:
            plain, costs = self.plain(bucket), self._measured(bucket, name)
            if plain is not None and costs:
                found[bucket] = {size: cost.times(1 / plain) for size, cost in costs.items()}
        return found

    def _nearest(self, bucket: BatchBucket, name: str, plain: Cost) -> dict[int, Cost]:
        """What drafts take at the nearest other context, or took in an earlier run."""
        for known in (self._relative(name), self._earlier.get(name, {})):
            others = [
                (abs(other.context - bucket.context), other)
                for other in known
                if other.batch == bucket.batch
            ]
            if others:
                costs = known[min(others)[1]]
                return {size: cost.times(plain.total) for size, cost in costs.items()}
        return {}

    # -- between runs --------------------------------------------------------------------------

    def to_dict(self, names: Sequence[str]) -> dict[str, Any]:
        """Returns what drafts and reading cost these drafters, in plain rounds, for a later run.
        What was not measured in this run is what the last one said."""
        plain = next(filter(None, map(self.plain, self.buckets)), None)
        found = {}
        for name in names:
            known = {**self._earlier.get(name, {}), **self._relative(name)}
            seen = self._reading.get(name)
            earlier = self._earlier_reading.get(name, 0.0)
            found[name] = {
                "costs": [
                    [*bucket, size, cost.levels, cost.total, cost.draft]
                    for bucket, costs in known.items()
                    for size, cost in costs.items()
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
            costs: dict[BatchBucket, dict[int, Cost]] = {}
            for batch, context, size, levels, total, draft in saved[name]["costs"]:
                at = costs.setdefault(BatchBucket(int(batch), int(context)), {})
                at[int(size)] = Cost(int(levels), float(total), float(draft), MIN_SAMPLES)
            self._earlier[name] = costs
            self._earlier_reading[name] = float(saved[name]["reading"])
