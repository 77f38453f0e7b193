"""The benchmark: at each batch size and temperature, all contestants on the same prompts."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from time import perf_counter

from outpace.bench.prompts import Prompt, batches
from outpace.bench.report.results import SettingResult, Sweep, SweepPoint, unmeasured
from outpace.bench.run.contest import BatchJob, Contestant
from outpace.bench.run.meter import Meter
from outpace.bench.run.ours import Ours
from outpace.bench.run.schedule import Clock, Pace, Tick, ignore, run_interleaved, warm_up
from outpace.bench.run.summary import (
    SettingRuns,
    SideMeasurements,
    counted,
    decode_seconds,
    speedup,
    summarise,
)
from outpace.bench.stats import roofline
from outpace.bench.stats.divergence import Divergence, watching
from outpace.bench.stats.identity import gap_of
from outpace.bench.stats.rounds import total_rounds
from outpace.bench.stats.theory import acceptance_of, expected_tokens, speedup_from_times
from outpace.errors import ConfigError, PromptError

Texts = list[list[list[int]]]
"""By job, the tokens of each of its texts."""

BASELINE = "plain"
"""Name of the contestant that all others are compared with."""


@dataclass(frozen=True)
class BenchmarkPlan:
    """What to run. Raises ``ConfigError`` for values that cannot be run."""

    batches: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    max_tokens: int = 128
    to_end: bool = False
    """Whether a text ends where the target's own plain text does, if that is before
    ``max_tokens``: what is written behind it repeats itself, and is drafted too easily."""
    max_prompt_tokens: int = 512
    pace: Pace = field(default_factory=Pace)
    seed: int = 0
    samples: int = 1
    """Texts of each prompt, written side by side: a batch holds so many times fewer prompts."""
    sweep: tuple[int, ...] = ()
    """Draft lengths that are also run, at the first batch size and temperature, for the curve of
    speed-up by draft length."""

    def __post_init__(self) -> None:
        if self.max_tokens < 2:
            raise ConfigError(f"--max-tokens must be at least 2, not {self.max_tokens}.")
        if not self.batches or min(self.batches) < 1:
            raise ConfigError("--batch must be whole numbers from 1 on.")
        if not self.temperatures or not all(0 <= t < math.inf for t in self.temperatures):
            raise ConfigError("--temperature must be numbers from 0 on.")
        if self.max_prompt_tokens < 1:
            raise ConfigError(
                f"--max-prompt-tokens must be at least 1, not {self.max_prompt_tokens}."
            )
        self._check_samples()
        if self.sweep and min(self.sweep) < 1:
            raise ConfigError("--sweep must be draft lengths from 1 on.")

    def _check_samples(self) -> None:
        if self.samples < 1:
            raise ConfigError(f"--samples must be at least 1, not {self.samples}.")
        uneven = next((batch for batch in self.batches if batch % self.samples), None)
        if uneven is not None:
            raise ConfigError(
                f"a batch of {uneven} cannot hold {self.samples} texts of each prompt: give "
                f"--batch {self.samples}, or a multiple of it."
            )
        if self.samples > 1 and min(self.temperatures) == 0:
            raise ConfigError(
                "all greedy texts of a prompt are the same one: --samples needs temperatures above "
                "0."
            )

    @property
    def settings(self) -> list[tuple[int, float]]:
        """All pairs of a batch size and a temperature, each once."""
        return list(dict.fromkeys(product(self.batches, self.temperatures)))


@dataclass(frozen=True)
class MeasuredSetting:
    """What was found at one batch size and temperature, and the runs that it was found from."""

    result: SettingResult
    runs: SettingRuns


@dataclass(frozen=True)
class Benchmark:
    """Prompts, contestants and a plan; one of the contestants is called "plain", the baseline."""

    plan: BenchmarkPlan
    prompts: Sequence[Prompt]
    encode: Callable[[str], list[int]]
    contestants: Sequence[Contestant]
    whole: bool = False
    """Whether a prompt that is too long is refused, instead of cut at its beginning: a chat's
    template must not lose its first tokens."""
    bandwidth: float | None = None
    """Bytes per second, None where it was not measured."""
    clock: Clock = perf_counter
    tick: Tick = ignore

    def run(self) -> list[MeasuredSetting]:
        """Runs all settings one after another."""
        if BASELINE not in [c.name for c in self.contestants]:
            raise ConfigError("a benchmark needs the contestant 'plain' to compare with.")
        settings = self.plan.settings
        return [self._setting(b, t, first=(b, t) == settings[0]) for b, t in settings]

    def ticks(self) -> int:
        """Returns how often `tick` will be called at most."""
        total = 0
        for batch, _ in self.plan.settings:
            jobs = len(self._batches(batch))
            total += len(self.contestants) * (jobs * self.plan.pace.repeats + self.plan.pace.warmup)
        sweep = (len(self.plan.sweep) + 1) if self.plan.sweep else 0
        return total + sweep * len(self._batches(self.plan.batches[0]))

    # -- one batch size and temperature ----------------------------------------------------------

    def _setting(self, batch: int, temperature: float, first: bool) -> MeasuredSetting:
        prompts = self._batches(batch)
        jobs = [self._job(of_job, temperature) for of_job in prompts]
        if self.plan.to_end:
            jobs = [self._ended(job) for job in jobs]
        refused = {c.name: c.refusal(batch, temperature) for c in self.contestants}
        fit = [c for c in self.contestants if refused[c.name] is None]
        peaks = warm_up(fit, jobs[0], self.plan.pace, self.tick)
        engines = [c for c in fit if isinstance(c, Ours) and not c.plain]
        context = round(SettingRuns(BASELINE, prompts, jobs, []).context)
        priced = [c for c in engines if roofline.has_one_price(c.llm)]
        meters = {c.name: Meter(c.llm, batch, context, temperature) for c in priced}
        lengths = {c.name: self._lengths(c, jobs[0]) for c in engines}
        # Before anything is timed: a rule whose divergence is unknown cannot be reported.
        divergences = {c.name: _divergence(c, jobs) for c in engines if not c.lossless}
        texts = {c.name: self._plain_texts(c, jobs) for c in engines}
        # Half of the samples before and half after the runs, so that both saw the same machine.
        self._sample(meters, lengths)
        gc.collect()
        timed = run_interleaved(fit, jobs, self.plan.pace, self.clock, self.tick)
        runs = SettingRuns(BASELINE, prompts, jobs, timed)
        for c in engines:
            lengths[c.name] |= set(total_rounds(run.made.metrics for run in runs.of(c.name)))
        self._sample(meters, lengths)
        methods = tuple(
            summarise(
                runs,
                c,
                replace(
                    self._beside(c, fit, meters.get(c.name), peaks, divergences),
                    own_plain=texts.get(c.name),
                ),
            )
            for c in fit
        )
        sweep = self._sweep(runs, engines[0], meters) if first and engines else None
        run = sum(map(len, prompts)) // self.plan.samples
        prompt_lengths = [len(p) for job in jobs for p in job.prompts]
        result = SettingResult(
            batch=batch,
            temperature=temperature,
            prompts=run,
            left_over=len(self.prompts) - run,
            samples=self.plan.samples,
            prompt_tokens=sum(prompt_lengths) / len(prompt_lengths),
            max_tokens=self.plan.max_tokens,
            to_end=self.plan.to_end,
            methods=methods,
            refused={name: reason for name, reason in refused.items() if reason is not None},
            sweep=sweep,
        )
        return MeasuredSetting(result, runs)

    def _batches(self, size: int) -> list[list[Prompt]]:
        """The prompts of each job, each as often as it has texts."""
        samples = self.plan.samples
        found = batches(self.prompts, size // samples)
        return [[prompt for prompt in batch for _ in range(samples)] for batch in found]

    def _job(self, prompts: Sequence[Prompt], temperature: float) -> BatchJob:
        rows = tuple(tuple(self._ids(p)) for p in prompts)
        if not all(rows):
            raise PromptError("a prompt is empty once it is tokenised.")
        tasks = tuple(prompt.task for prompt in prompts)
        plan = self.plan
        return BatchJob(
            rows, plan.max_tokens, temperature, plan.seed, samples=plan.samples, tasks=tasks
        )

    def _ended(self, job: BatchJob) -> BatchJob:
        """The job with as many tokens as plain decoding writes before the target ends its texts; of
        a batch, those of the longest. A greedy text alone ends by itself there."""
        plain = next(c for c in self.contestants if c.name == BASELINE)
        if not isinstance(plain, Ours):
            raise ConfigError("--to-end needs plain decoding by outpace, which tells the ends.")
        length = plain.length(job)
        alone = len(job.prompts) == 1 and job.temperature == 0 and length > 1
        return replace(job, max_tokens=max(2, length), most=job.max_tokens if alone else None)

    def _ids(self, prompt: Prompt) -> list[int]:
        ids, longest = self.encode(prompt.text), self.plan.max_prompt_tokens
        if self.whole and len(ids) > longest:
            raise PromptError(
                f"prompt {prompt.id} has {len(ids)} tokens with its chat template, and a chat "
                f"cannot be cut to {longest}: raise --max-prompt-tokens, or leave it out."
            )
        return ids[-longest:]

    def _plain_texts(self, contestant: Ours, jobs: Sequence[BatchJob]) -> Texts | None:
        """What plain decoding writes for these jobs with the noise of a contestant's rule; None
        where no sampled text has to be that one, or it is the baseline's."""
        baseline = next(c for c in self.contestants if c.name == BASELINE)
        same = contestant.same_text_when_sampled and jobs[0].temperature > 0
        if not same or baseline.same_text_when_sampled:
            return None
        plain = Ours(contestant.llm, contestant.name, "off", shared=True)
        return [plain.run(job).texts for job in jobs]

    def _lengths(self, contestant: Ours, job: BatchJob) -> set[int]:
        """The draft lengths that the rounds of a job have."""
        return set(total_rounds([contestant.run(job).metrics]))

    def _sample(self, meters: dict[str, Meter], lengths: dict[str, set[int]]) -> None:
        for name, meter in meters.items():
            scored = {1, *(k + 1 for k in lengths[name])}
            meter.sample(lengths[name], scored, repeats=5)

    def _beside(
        self,
        contestant: Contestant,
        fit: Sequence[Contestant],
        meter: Meter | None,
        peaks: dict[str, int],
        divergences: dict[str, Divergence],
    ) -> SideMeasurements:
        baseline = next(c for c in self.contestants if c.name == BASELINE)
        gap = gap_of(baseline.llm.engine.target) if isinstance(baseline, Ours) else None
        if not isinstance(contestant, Ours):
            return SideMeasurements(gap=gap, peaks=peaks)
        known = contestant.plain or meter is not None
        whole = known and not roofline.reads_a_part(contestant.llm)
        measured = self.bandwidth is not None and whole
        return SideMeasurements(
            gap=gap,
            times=meter.times if meter else None,
            bandwidth=self.bandwidth,
            target=roofline.target_traffic(contestant.llm) if measured else None,
            drafter=roofline.drafter_traffic(contestant.llm) if measured else None,
            divergence=divergences.get(contestant.name),
            peaks=peaks,
            peers=[c.name for c in fit if not isinstance(c, Ours)],
        )

    # -- speed-up by draft length ------------------------------------------------------------------

    def _sweep(self, runs: SettingRuns, engine: Ours, meters: dict[str, Meter]) -> Sweep | None:
        if not self.plan.sweep:
            return None
        # Not this engine without drafts, whose drafter would be told of each round.
        plain = next(c for c in self.contestants if c.name == BASELINE)
        fixed = {k: Ours(engine.llm, f"K={k}", k, shared=True) for k in self.plan.sweep}
        once = Pace(1, 0)
        timed = run_interleaved([plain, *fixed.values()], runs.jobs, once, self.clock, self.tick)
        swept = SettingRuns(BASELINE, runs.prompts, runs.jobs, timed)
        meter = meters.get(engine.name)
        if meter:
            meter.sample(self.plan.sweep, {1, *(k + 1 for k in self.plan.sweep)}, repeats=5)
        drafted = counted([run for run in timed if run.contestant != BASELINE])
        if drafted is None:
            return None
        alpha = acceptance_of(drafted.accepted_per_position, drafted.drafted_per_position)
        points = []
        for k, contestant in fixed.items():
            ratio = speedup(swept, contestant.name, decode_seconds)
            own = counted(swept.of(contestant.name))
            if ratio is None or own is None:
                continue
            # The prediction takes the tokens per round that this draft length had; the theory
            # those that it would have if acceptances were independent.
            theory = speedup_from_times(alpha, k, meter.times) if meter else None
            predicted = theory * own.length / expected_tokens(alpha, k) if theory else None
            points.append(SweepPoint(k, ratio, predicted, theory))
        return Sweep(engine.name, alpha, tuple(points))


def _divergence(contestant: Ours, jobs: Sequence[BatchJob]) -> Divergence:
    """Runs jobs untimed and watched, until enough states were seen."""
    with watching(contestant.llm) as watch:
        for job in jobs:
            if len(watch.found) >= watch.limit:
                break
            contestant.run(job)
    found = watch.divergence()
    if found is None:
        raise unmeasured(contestant.rule, len(jobs[0].prompts), jobs[0].temperature)
    return found
