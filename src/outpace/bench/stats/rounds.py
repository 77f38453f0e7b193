"""Counters of many texts put together, and the rounds that they were made in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from outpace.bench.stats.theory import Times
from outpace.core.stats import Metrics


@dataclass(frozen=True)
class AcceptanceCounts:
    """Drafted and accepted tokens; the definitions are those of ``core.stats``."""

    drafted: int
    accepted: int
    emitted: int
    passes: int
    drafted_per_position: tuple[int, ...]
    accepted_per_position: tuple[int, ...]

    @property
    def rate(self) -> float:
        """Accepted / drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def length(self) -> float:
        """Tokens per target pass, the correction or bonus included."""
        return self.emitted / self.passes if self.passes else 0.0

    @property
    def per_position(self) -> list[float]:
        """Accepted to this depth / drafted to this depth (vLLM's definition)."""
        pairs = zip(self.accepted_per_position, self.drafted_per_position, strict=True)
        return [accepted / drafted for accepted, drafted in pairs if drafted]

    @property
    def conditional(self) -> list[float]:
        """Accepted at this depth / drafted there with all before it accepted (SPEED-Bench's)."""
        before = [*self.drafted_per_position[:1], *self.accepted_per_position]
        judged = map(min, zip(self.drafted_per_position, before, strict=False))
        pairs = zip(self.accepted_per_position, judged, strict=True)
        return [accepted / count for accepted, count in pairs if count]


def acceptance(metrics: Iterable[Metrics]) -> AcceptanceCounts:
    """Returns the sums over texts."""
    listed = list(metrics)
    return AcceptanceCounts(
        drafted=sum(m.num_draft_tokens for m in listed),
        accepted=sum(m.num_accepted_tokens for m in listed),
        emitted=sum(m.num_emitted_tokens for m in listed),
        passes=sum(m.num_target_passes for m in listed),
        drafted_per_position=_summed([m.drafted_per_position for m in listed]),
        accepted_per_position=_summed([m.accepted_per_position for m in listed]),
    )


def _summed(columns: Sequence[Sequence[int]]) -> tuple[int, ...]:
    depth = max(map(len, columns), default=0)
    return tuple(sum(c[i] for c in columns if i < len(c)) for i in range(depth))


def rounds_of(metrics: Sequence[Metrics]) -> dict[int, int]:
    """Returns how many rounds drafted how many tokens, for one batch.

    The text that took part in most rounds stands for all: it saw all of them. Of a tree, whose
    counters are by depth, the mean number of nodes is taken.
    """
    if not metrics:
        return {}
    longest = max(metrics, key=lambda m: m.num_target_passes)
    depths = [longest.num_target_passes, *longest.drafted_per_position, 0]
    counts = {k: depths[k] - depths[k + 1] for k in range(len(depths) - 1)}
    if longest.num_draft_tokens != sum(longest.drafted_per_position):
        drafting = longest.drafted_per_position[0]
        nodes = round(longest.num_draft_tokens / drafting)
        counts = {0: counts[0], nodes: drafting}
    return {k: count for k, count in counts.items() if count}


def total_rounds(batches: Iterable[Sequence[Metrics]]) -> dict[int, int]:
    """Returns how many rounds drafted how many tokens, over several batches."""
    total: Counter[int] = Counter()
    for metrics in batches:
        total.update(rounds_of(metrics))
    return dict(total)


def predicted_seconds(rounds: Mapping[int, int], times: Times) -> float:
    """Returns what these rounds cost by the times of their parts: no engine around them."""
    return sum(count * times.round(k) for k, count in rounds.items())


@dataclass(frozen=True)
class Split:
    """Where the seconds went. Prefill is part of ``verify``; ``other`` is the rest of the wall
    time: tokenizing, admission, the loop itself."""

    draft: float
    verify: float
    sample: float
    other: float

    @property
    def total(self) -> float:
        """All seconds."""
        return self.draft + self.verify + self.sample + self.other


def split(runs: Iterable[tuple[float, Sequence[Metrics]]]) -> Split | None:
    """Returns the split of several batches' wall seconds, None where nobody counted."""
    parts = [0.0, 0.0, 0.0, 0.0]
    for seconds, metrics in runs:
        if not metrics:
            return None
        # A round counts whole for each of its rows: the row that saw all rounds stands for all.
        longest = max(metrics, key=lambda m: m.total_seconds)
        own = [longest.draft_seconds, longest.verify_seconds, longest.sample_seconds]
        for index, value in enumerate([*own, max(0.0, seconds - sum(own))]):
            parts[index] += value
    return Split(*parts)
