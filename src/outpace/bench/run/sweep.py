"""The speed-up of one engine by draft length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from outpace.bench.report.results import Sweep, SweepPoint
from outpace.bench.run.contest import Contestant
from outpace.bench.run.ours import Ours
from outpace.bench.run.schedule import Clock, Pace, Tick, run_interleaved
from outpace.bench.run.summary import SettingRuns, counted, decode_seconds, speedup
from outpace.bench.run.untimed import Untimed
from outpace.bench.stats.theory import Times, acceptance_of, expected_tokens, speedup_from_times

ONCE = Pace(1, 0)


class LengthSweep:
    """Runs of one engine with each of some fixed draft lengths, beside the baseline."""

    def __init__(self, engine: Ours, baseline: Contestant, lengths: Sequence[int]) -> None:
        self._engine, self._lengths = engine, lengths
        # Not this engine without drafts, whose drafter would be told of each round.
        self._baseline = baseline
        self._fixed = {k: Ours(engine.llm, f"K={k}", k, shared=True) for k in lengths}

    def run(self, runs: SettingRuns, untimed: Untimed, clock: Clock, tick: Tick) -> Sweep | None:
        """Returns the speed-up by draft length, on the jobs of a setting; None where nothing was
        drafted."""
        contestants = [self._baseline, *self._fixed.values()]
        timed = run_interleaved(contestants, runs.jobs, ONCE, clock, tick)
        untimed.sample(self._lengths)
        drafted = counted([run for run in timed if run.contestant != self._baseline.name])
        if drafted is None:
            return None
        alpha = acceptance_of(drafted.accepted_per_position, drafted.drafted_per_position)
        swept = SettingRuns(runs.baseline, runs.prompts, runs.jobs, timed)
        points = tuple(_points(swept, self._fixed, alpha, untimed.times))
        return Sweep(self._engine.name, alpha, points)


def _points(
    swept: SettingRuns, fixed: Mapping[int, Ours], alpha: float, times: Times | None
) -> Iterator[SweepPoint]:
    """The prediction takes the tokens per round that a draft length had; the theory those that it
    would have if acceptances were independent."""
    for k, contestant in fixed.items():
        ratio = speedup(swept, contestant.name, decode_seconds)
        own = counted(swept.of(contestant.name))
        if ratio is None or own is None:
            continue
        theory = speedup_from_times(alpha, k, times) if times is not None else None
        predicted = theory * own.length / expected_tokens(alpha, k) if theory is not None else None
        yield SweepPoint(k, ratio, predicted, theory)
