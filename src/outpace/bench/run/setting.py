"""The measuring of one batch size and temperature."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter

from outpace.bench.prompts import Prompt
from outpace.bench.report.results import MethodResult, SettingResult, Sweep
from outpace.bench.run.contest import BASELINE, BatchJob, Contestant
from outpace.bench.run.meter import Meter, has_parts
from outpace.bench.run.ours import Ours
from outpace.bench.run.plan import BenchmarkPlan
from outpace.bench.run.schedule import (
    Clock,
    Stopped,
    Tick,
    TimedRun,
    ignore,
    run_interleaved,
    warm_up,
)
from outpace.bench.run.summary import SettingRuns, SideMeasurements, summarise
from outpace.bench.run.sweep import LengthSweep
from outpace.bench.run.untimed import Untimed
from outpace.bench.stats import roofline
from outpace.bench.stats.identity import Gap, gap_of


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
        """Returns the first jobs of work that was stopped behind them."""
        planned = sum(map(len, self.prompts))
        first, prompts = self.jobs[:jobs], self.prompts[:jobs]
        return replace(self, prompts=prompts, jobs=first, stopped_of=planned)


@dataclass(frozen=True)
class Instruments:
    """What is measured with."""

    bandwidth: float | None = None
    """Bytes of memory that are read per second; None where it was not measured."""
    clock: Clock = perf_counter
    tick: Tick = ignore


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
        self._engines = [c for c in self._taking_part if isinstance(c, Ours) and not c.plain]

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
            summarise(runs, c, self._beside(c, untimed.get(c.name), peaks))
            for c in self._taking_part
        )
        return MeasuredSetting(self._result(methods, sweep), runs)

    def _untimed(self, engine: Ours) -> Untimed:
        context = round(self._runs([]).context)
        priced = roofline.has_one_price(engine.llm) and has_parts(engine.llm)
        work = self._work
        meter = Meter(engine.llm, work.batch, context, work.temperature) if priced else None
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

    def _beside(
        self, contestant: Contestant, untimed: Untimed | None, peaks: Mapping[str, int]
    ) -> SideMeasurements:
        """What was measured of a contestant besides its timed runs. untimed: of an engine that
        speculates."""
        if not isinstance(contestant, Ours):
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
            peers=[c.name for c in self._taking_part if not isinstance(c, Ours)],
        )

    @cached_property
    def _gap(self) -> Gap | None:
        """The measure of a difference from the baseline's texts, where that is ours."""
        baseline = self._baseline
        return gap_of(baseline.llm.engine.target) if isinstance(baseline, Ours) else None

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
