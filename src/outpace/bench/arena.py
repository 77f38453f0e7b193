"""The benchmark: for each batch size and temperature, all contestants on the same prompts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from outpace.bench import roofline
from outpace.bench.contest import Contestant, Job
from outpace.bench.divergence import Divergence, watching
from outpace.bench.identity import gap_of
from outpace.bench.meter import Meter
from outpace.bench.ours import Ours
from outpace.bench.prompts import Prompt, batches
from outpace.bench.results import Cell, Sweep, SweepPoint, unmeasured
from outpace.bench.rounds import total_rounds
from outpace.bench.schedule import Clock, Pace, Tick, Trial, ignore, play, warm_up
from outpace.bench.summary import Known, Observed, counted, decode, speedup, summarise
from outpace.bench.theory import acceptance_of, expected_tokens, speedup_from_times
from outpace.core.stats import Metrics
from outpace.errors import ConfigError, PromptError

BASELINE = "plain"


@dataclass(frozen=True)
class ArenaPlan:
    """What to run."""

    batches: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    max_tokens: int = 128
    max_prompt_tokens: int = 512
    pace: Pace = field(default_factory=Pace)
    seed: int = 0
    sweep: tuple[int, ...] = ()
    """Draft lengths to run in the first cell, for the curve of speed-up by length."""

    def __post_init__(self) -> None:
        if self.max_tokens < 2:
            raise ConfigError(f"--max-tokens must be at least 2, not {self.max_tokens}.")
        if not self.batches or min(self.batches) < 1:
            raise ConfigError("--batch must be whole numbers from 1 on.")
        if not self.temperatures or min(self.temperatures) < 0:
            raise ConfigError("--temperature must be numbers from 0 on.")
        if self.sweep and min(self.sweep) < 1:
            raise ConfigError("--sweep must be draft lengths from 1 on.")

    @property
    def cells(self) -> list[tuple[int, float]]:
        """Batch size and temperature of each cell."""
        return [(b, t) for b in self.batches for t in self.temperatures]


@dataclass(frozen=True)
class Played:
    """A cell, and the trials that it was made from."""

    cell: Cell
    seen: Observed


@dataclass(frozen=True)
class Arena:
    """Prompts, contestants and a plan; `play` makes the cells of a report.

    The contestant called "plain" is the baseline.
    """

    plan: ArenaPlan
    prompts: Sequence[Prompt]
    encode: Callable[[str], list[int]]
    contestants: Sequence[Contestant]
    bandwidth: float | None = None
    clock: Clock = perf_counter
    tick: Tick = ignore

    def play(self) -> list[Played]:
        """Runs everything, cell by cell."""
        if BASELINE not in [c.name for c in self.contestants]:
            raise ConfigError("a benchmark needs the contestant 'plain' to compare with.")
        cells = self.plan.cells
        return [self._cell(b, t, first=(b, t) == cells[0]) for b, t in cells]

    def ticks(self) -> int:
        """How often `tick` will be called, about."""
        total = 0
        for batch, _ in self.plan.cells:
            jobs = len(batches(self.prompts, batch))
            total += len(self.contestants) * (jobs * self.plan.pace.repeats + self.plan.pace.warmup)
        sweep = (len(self.plan.sweep) + 1) if self.plan.sweep else 0
        return total + sweep * len(batches(self.prompts, self.plan.batches[0]))

    # -- one cell ------------------------------------------------------------------------------

    def _cell(self, batch: int, temperature: float, first: bool) -> Played:
        units = batches(self.prompts, batch)
        jobs = [self._job(unit, temperature) for unit in units]
        refused = {c.name: c.refusal(batch, temperature) for c in self.contestants}
        fit = [c for c in self.contestants if refused[c.name] is None]
        peaks = warm_up(fit, jobs[0], self.plan.pace, self.tick)
        engines = [c for c in fit if isinstance(c, Ours) and not c.plain]
        context = round(Observed(BASELINE, units, jobs, []).context)
        meters = {c.name: Meter(c.llm, batch, context, temperature) for c in engines}
        lengths = {c.name: self._lengths(c, jobs[0]) for c in engines}
        # Before anything is timed: what cannot be reported need not be run.
        divergences = {c.name: _divergence(c, jobs) for c in engines if not c.lossless}
        # Half of the samples before and half after, so that they see the machine that the runs saw.
        self._sample(meters, lengths)
        gc.collect()
        trials = play(fit, jobs, self.plan.pace, self.clock, self.tick)
        for c in engines:
            lengths[c.name] |= set(total_rounds(_counters(trials, c.name)))
        self._sample(meters, lengths)
        seen = Observed(BASELINE, units, jobs, trials)
        methods = tuple(
            summarise(seen, c, self._known(c, fit, meters.get(c.name), peaks, divergences))
            for c in fit
        )
        sweep = self._sweep(seen, engines[0], meters) if first and engines else None
        lengths_of_prompts = [len(p) for job in jobs for p in job.prompts]
        cell = Cell(
            batch=batch,
            temperature=temperature,
            prompts=sum(map(len, units)),
            prompt_tokens=sum(lengths_of_prompts) / len(lengths_of_prompts),
            max_tokens=self.plan.max_tokens,
            methods=methods,
            refused={name: reason for name, reason in refused.items() if reason is not None},
            sweep=sweep,
        )
        return Played(cell, seen)

    def _job(self, unit: Sequence[Prompt], temperature: float) -> Job:
        rows = tuple(tuple(self.encode(p.text)[-self.plan.max_prompt_tokens :]) for p in unit)
        if not all(rows):
            raise PromptError("a prompt is empty once it is tokenised.")
        return Job(rows, self.plan.max_tokens, temperature, self.plan.seed)

    def _lengths(self, contestant: Ours, job: Job) -> set[int]:
        return set(total_rounds([contestant.run(job).metrics]))

    def _sample(self, meters: dict[str, Meter], lengths: dict[str, set[int]]) -> None:
        for name, meter in meters.items():
            scored = {1, *(k + 1 for k in lengths[name])}
            meter.sample(lengths[name], scored, repeats=5)

    def _known(
        self,
        contestant: Contestant,
        fit: Sequence[Contestant],
        meter: Meter | None,
        peaks: dict[str, int],
        divergences: dict[str, Divergence],
    ) -> Known:
        baseline = next(c for c in self.contestants if c.name == BASELINE)
        gap = gap_of(baseline.llm.engine.target) if isinstance(baseline, Ours) else None
        if not isinstance(contestant, Ours):
            return Known(gap=gap, peaks=peaks)
        measured = self.bandwidth is not None
        return Known(
            gap=gap,
            times=meter.times if meter else None,
            bandwidth=self.bandwidth,
            target=roofline.target_traffic(contestant.llm) if measured else None,
            drafter=roofline.drafter_traffic(contestant.llm) if measured else None,
            divergence=divergences.get(contestant.name),
            peaks=peaks,
            peers=[c.name for c in fit if not isinstance(c, Ours)],
        )

    # -- the curve -----------------------------------------------------------------------------

    def _sweep(self, seen: Observed, engine: Ours, meters: dict[str, Meter]) -> Sweep | None:
        if not self.plan.sweep:
            return None
        plain = Ours(engine.llm, BASELINE, "off")
        fixed = {k: Ours(engine.llm, f"K={k}", k) for k in self.plan.sweep}
        pace = Pace(1, 0)
        trials = play([plain, *fixed.values()], seen.jobs, pace, self.clock, self.tick)
        swept = Observed(BASELINE, seen.units, seen.jobs, trials)
        meter = meters[engine.name]
        meter.sample(self.plan.sweep, {1, *(k + 1 for k in self.plan.sweep)}, repeats=5)
        drafted = counted([t for t in trials if t.contestant != BASELINE])
        if drafted is None:
            return None
        alpha = acceptance_of(drafted.accepted_per_position, drafted.drafted_per_position)
        points = []
        for k, contestant in fixed.items():
            ratio = speedup(swept, contestant.name, decode)
            own = counted(swept.of(contestant.name))
            if ratio is None or own is None:
                continue
            # The theory's tokens per round, exchanged for those of this draft length.
            gain = speedup_from_times(alpha, k, meter.times)
            points.append(SweepPoint(k, ratio, gain * own.length / expected_tokens(alpha, k), gain))
        return Sweep(engine.name, alpha, tuple(points))


def _counters(trials: Sequence[Trial], name: str) -> list[Sequence[Metrics]]:
    return [trial.outcome.metrics for trial in trials if trial.contestant == name]


def _divergence(contestant: Ours, jobs: Sequence[Job]) -> Divergence:
    """Runs jobs untimed and watched, until enough was seen."""
    with watching(contestant.llm) as watch:
        for job in jobs:
            if len(watch.found) >= watch.limit:
                break
            contestant.run(job)
    found = watch.divergence()
    if found is None:
        raise unmeasured(contestant.rule, len(jobs[0].prompts), jobs[0].temperature)
    return found
