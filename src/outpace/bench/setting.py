"""The measuring of one batch size and temperature: timed runs, what is measured besides, and the
speed-up by draft length."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter

from outpace.bench import roofline
from outpace.bench.contest import (
    BASELINE,
    BatchJob,
    BenchmarkPlan,
    Clock,
    Contestant,
    OutpaceContestant,
    Pace,
    Stopped,
    Tick,
    TimedRun,
    run_interleaved,
    warm_up,
)
from outpace.bench.divergence import Divergence, watching
from outpace.bench.meter import Meter, has_parts
from outpace.bench.prompts import Prompt
from outpace.bench.results import MethodResult, SettingResult, Sweep, SweepPoint, unmeasured
from outpace.bench.statistics import Gap, gap_of, total_rounds
from outpace.bench.summary import (
    SettingRuns,
    SideMeasurements,
    counted,
    decode_seconds,
    speedup,
    summarise,
)
from outpace.bench.theory import Times, acceptance_of, expected_tokens, speedup_from_times
from outpace.core.progress import silent

Texts = list[list[list[int]]]
"""By job, the tokens of each of its texts."""

ALL_STATES, STATES = 64, 8
"""States at which a lossy rule's divergence is measured, about, and those of one job, at least."""

REPEATS = 5
"""How often each part is timed in one sample."""


class Untimed:
    """What is measured of one speculative engine besides its timed runs.

    All but the times of its parts is measured at once, before anything is timed: a lossy rule whose
    divergence is unknown cannot be reported, and raises ``ConfigError``.
    """

    def __init__(
        self,
        engine: OutpaceContestant,
        jobs: Sequence[BatchJob],
        baseline: Contestant,
        meter: Meter | None,
    ) -> None:
        """meter: of the engine's parts; None where these have no cost of their own."""
        self.meter = meter
        self._lengths = set(total_rounds([engine.run(jobs[0]).metrics]))
        self.divergence = None if engine.lossless else _divergence(engine, jobs)
        self.plain_texts = _plain_texts(engine, jobs, baseline)

    @property
    def times(self) -> Times | None:
        """The times of the parts, as far as they were sampled."""
        return self.meter.times if self.meter else None

    def see(self, runs: Iterable[TimedRun]) -> None:
        """Learns which draft lengths the rounds of some runs had."""
        self._lengths |= set(total_rounds(run.made.metrics for run in runs))

    def sample(self, lengths: Iterable[int] | None = None) -> None:
        """Times the parts of rounds with these draft lengths; unset: with all that were seen."""
        if self.meter:
            drafted = self._lengths if lengths is None else {*lengths}
            self.meter.sample(drafted, {1, *(k + 1 for k in drafted)}, repeats=REPEATS)


def _plain_texts(
    engine: OutpaceContestant, jobs: Sequence[BatchJob], baseline: Contestant
) -> Texts | None:
    """What plain decoding writes for these jobs with the noise of an engine's rule; None where no
    sampled text has to be that one, or it is the baseline's."""
    same = engine.same_text_when_sampled and jobs[0].temperature > 0
    if not same or baseline.same_text_when_sampled:
        return None
    plain = OutpaceContestant(engine.llm, engine.name, "off", shared=True)
    return [plain.run(job).texts for job in jobs]


def _spread(jobs: Sequence[BatchJob]) -> list[BatchJob]:
    """Returns the jobs in another order, in which the first few come from all parts of the list."""
    step = max(1, round(len(jobs) ** 0.5))
    return [job for first in range(step) for job in jobs[first::step]]


def _divergence(contestant: OutpaceContestant, jobs: Sequence[BatchJob]) -> Divergence:
    """Runs jobs untimed and watched, until enough states were seen: a few of each, so that they are
    of several tasks, in an order that goes through the whole list."""
    of_each = max(STATES, -(-ALL_STATES // len(jobs)))
    with watching(contestant.llm) as watch:
        for job in _spread(jobs):
            if len(watch.found) >= ALL_STATES:
                break
            watch.limit = len(watch.found) + of_each
            contestant.run(job)
    found = watch.divergence()
    if found is None:
        raise unmeasured(contestant.rule, len(jobs[0].prompts), jobs[0].temperature)
    return found


# -- the speed-up of one engine by draft length ------------------------------------------------


ONCE = Pace(1, 0)


class LengthSweep:
    """Runs of one engine with each of some fixed draft lengths, and of the baseline."""

    def __init__(
        self, engine: OutpaceContestant, baseline: Contestant, lengths: Sequence[int]
    ) -> None:
        self._engine, self._lengths = engine, lengths
        # Not this engine without drafts, whose drafter would observe each round.
        self._baseline = baseline
        self._fixed = {k: OutpaceContestant(engine.llm, f"K={k}", k, shared=True) for k in lengths}

    def run(self, runs: SettingRuns, untimed: Untimed, clock: Clock, tick: Tick) -> Sweep | None:
        """Returns the speed-up by draft length, on the jobs of a setting; None where nothing was
        drafted."""
        contestants = [self._baseline, *self._fixed.values()]
        timed = run_interleaved(contestants, runs.jobs, ONCE, clock, tick)
        untimed.sample(self._lengths)
        drafted = counted([run for run in timed if run.contestant != self._baseline.name])
        if drafted is None:
            return None
        alpha = acceptance_of(drafted.accepted_per_position, drafted.judged_per_position)
        swept = SettingRuns(runs.baseline, runs.prompts, runs.jobs, timed)
        points = tuple(_points(swept, self._fixed, alpha, untimed.times))
        return Sweep(self._engine.name, alpha, points)


def _points(
    swept: SettingRuns, fixed: Mapping[int, OutpaceContestant], alpha: float, times: Times | None
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


# -- one batch size and temperature ------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """The jobs of one batch size and temperature; ``prompts[j]`` are the prompts of ``jobs[j]``."""

    batch: int
    temperature: float
    prompts: Sequence[Sequence[Prompt]]
    jobs: Sequence[BatchJob]
    left_over: int = 0
    """Prompts that fill no batch."""
    stopped_of: int | None = None
    """The prompts that there were to be, where Ctrl-C came before all of them."""

    def first(self, jobs: int) -> Work:
        """Returns the first jobs of work that was stopped after them."""
        planned = sum(map(len, self.prompts))
        first, prompts = self.jobs[:jobs], self.prompts[:jobs]
        return replace(self, prompts=prompts, jobs=first, stopped_of=planned)


@dataclass(frozen=True)
class Instruments:
    """What is measured with."""

    bandwidth: float | None = None
    """Bytes of memory that are read per second; None where it was not measured."""
    clock: Clock = perf_counter
    tick: Tick = silent


@dataclass(frozen=True)
class MeasuredSetting:
    """What was found at one batch size and temperature, and the runs that it was found from."""

    result: SettingResult
    runs: SettingRuns


class Setting:
    """One batch size and temperature, at which all contestants that take part are measured."""

    def __init__(
        self,
        plan: BenchmarkPlan,
        work: Work,
        contestants: Sequence[Contestant],
        tools: Instruments,
    ) -> None:
        self._plan, self._work, self._tools = plan, work, tools
        self._baseline = next(c for c in contestants if c.name == BASELINE)
        asked = {c.name: c.refusal(work.batch, work.temperature) for c in contestants}
        self._refused = {name: reason for name, reason in asked.items() if reason is not None}
        self._taking_part = [c for c in contestants if c.name not in self._refused]
        self._engines = [
            c for c in self._taking_part if isinstance(c, OutpaceContestant) and not c.plain
        ]

    def measure(self, with_sweep: bool) -> MeasuredSetting:
        """Measures everything. with_sweep: also the planned draft lengths, of the first engine.

        After Ctrl-C the result is that of the jobs that had been run, without the times of a
        round's parts and without the draft lengths. ``KeyboardInterrupt`` where that is none.
        """
        jobs, pace, tools = self._work.jobs, self._plan.pace, self._tools
        peaks = warm_up(self._taking_part, jobs[0], pace, tools.tick)
        untimed = {c.name: self._untimed(c) for c in self._engines}
        # Half of the samples before and half after the runs, so that both saw the same machine.
        for each in untimed.values():
            each.sample()
        gc.collect()
        try:
            timed = run_interleaved(self._taking_part, jobs, pace, tools.clock, tools.tick)
        except Stopped as stop:
            if not stop.runs:
                raise
            timed = list(stop.runs)
            self._work = self._work.first(1 + max(run.job for run in timed))
        runs, sweep = self._runs(timed), None
        if self._work.stopped_of is None:
            try:
                for name, each in untimed.items():
                    each.see(runs.of(name))
                    each.sample()
                sweep = self._sweep(runs, untimed) if with_sweep else None
            except KeyboardInterrupt:
                self._work = self._work.first(len(jobs))
        methods = tuple(
            summarise(runs, c, self._besides(c, untimed.get(c.name), peaks))
            for c in self._taking_part
        )
        return MeasuredSetting(self._result(methods, sweep), runs)

    def _untimed(self, engine: OutpaceContestant) -> Untimed:
        context = round(self._runs([]).context)
        modelled = roofline.has_one_cost(engine.llm) and has_parts(engine.llm)
        work = self._work
        meter = Meter(engine.llm, work.batch, context, work.temperature) if modelled else None
        return Untimed(engine, work.jobs, self._baseline, meter)

    def _runs(self, timed: Sequence[TimedRun]) -> SettingRuns:
        return SettingRuns(BASELINE, self._work.prompts, self._work.jobs, timed)

    def _sweep(self, runs: SettingRuns, untimed: Mapping[str, Untimed]) -> Sweep | None:
        if not self._plan.sweep or not self._engines:
            return None
        engine = self._engines[0]
        sweep = LengthSweep(engine, self._baseline, self._plan.sweep)
        return sweep.run(runs, untimed[engine.name], self._tools.clock, self._tools.tick)

    # -- what was found --------------------------------------------------------------------------

    def _besides(
        self, contestant: Contestant, untimed: Untimed | None, peaks: Mapping[str, int]
    ) -> SideMeasurements:
        """What was measured of a contestant besides its timed runs. untimed: of an engine that
        speculates."""
        if not isinstance(contestant, OutpaceContestant):
            return SideMeasurements(gap=self._gap, peaks=peaks)
        work, bandwidth = self._work, self._tools.bandwidth
        times = untimed.times if untimed and work.stopped_of is None else None
        plain_texts = untimed.plain_texts if untimed else None
        known = contestant.plain or times is not None
        whole = known and not roofline.reads_a_part(contestant.llm)
        bounded = bandwidth is not None and whole
        return SideMeasurements(
            gap=self._gap,
            times=times,
            bandwidth=bandwidth,
            target=roofline.target_traffic(contestant.llm) if bounded else None,
            drafter=roofline.drafter_traffic(contestant.llm) if bounded else None,
            divergence=untimed.divergence if untimed else None,
            own_plain=None if plain_texts is None else plain_texts[: len(work.jobs)],
            peaks=peaks,
            peers=[c.name for c in self._taking_part if not isinstance(c, OutpaceContestant)],
        )

    @cached_property
    def _gap(self) -> Gap | None:
        """The measure of a difference from the baseline's texts, where that is ours."""
        baseline = self._baseline
        return (
            gap_of(baseline.llm.engine.target) if isinstance(baseline, OutpaceContestant) else None
        )

    def _result(self, methods: tuple[MethodResult, ...], sweep: Sweep | None) -> SettingResult:
        work, samples = self._work, self._plan.samples
        lengths = [len(prompt) for job in work.jobs for prompt in job.prompts]
        return SettingResult(
            batch=work.batch,
            temperature=work.temperature,
            prompts=sum(map(len, work.prompts)) // samples,
            left_over=work.left_over,
            stopped_of=None if work.stopped_of is None else work.stopped_of // samples,
            samples=samples,
            prompt_tokens=sum(lengths) / len(lengths),
            max_tokens=self._plan.max_tokens,
            to_end=self._plan.to_end,
            methods=methods,
            refused=self._refused,
            sweep=sweep,
        )
