"""Interleaving, pairing and the A/A check, on a clock that is not a real one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest

from outpace.bench.benchmark import Benchmark
from outpace.bench.contest import (
    BatchJob,
    BatchTexts,
    BenchmarkPlan,
    Contestant,
    Pace,
    Stopped,
    run_interleaved,
)
from outpace.bench.prompts import Prompt
from outpace.bench.summary import (
    SettingRuns,
    SideMeasurements,
    all_seconds,
    decode_seconds,
    speedup,
    speedup_by_job,
    summarise,
    throughput,
)
from outpace.bench.table import notes, title
from outpace.bench.theory import Times
from outpace.core.stats import Metrics
from outpace.errors import ConfigError

PROMPTS = [Prompt(f"p{i}", f"task {i % 3}", f"text {i}") for i in range(12)]


@dataclass
class Clock:
    """Stands still but for what contestants add; the machine gets slower and noisier on the way."""

    noise: float = 0.0
    drift: float = 0.0
    now: float = 0.0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        slow = 1 + self.drift * self.now
        self.now += seconds * slow * float(np.exp(self.rng.normal(0, self.noise)))


class Fake(Contestant):
    """Takes a given time per token, plus a second per prompt."""

    def __init__(self, name: str, clock: Clock, per_token: float, extra: int = 0) -> None:
        self.name, self.what = name, "fake"
        self._clock, self._per_token, self._extra = clock, per_token, extra
        self.seen: list[BatchJob] = []
        self.found_again = 0
        self.forget_texts()

    def forget_texts(self) -> None:
        self.known: set[BatchJob] = set()

    def run(self, job: BatchJob) -> BatchTexts:
        self.seen.append(job)
        self.found_again += job in self.known
        self.known.add(job)
        self._clock.spend(1.0 + (job.max_tokens - 1) * self._per_token)
        text = [sum(job.prompts[0]) + i for i in range(job.max_tokens + self._extra)]
        return BatchTexts([text for _ in job.prompts])


def jobs(count: int = 12, tokens: int = 11) -> list[BatchJob]:
    return [BatchJob(((i, i + 1),), tokens, 0.0) for i in range(count)]


def observed(contestants: Sequence[Contestant], clock: Clock, repeats: int = 1) -> SettingRuns:
    listed = jobs()
    runs = run_interleaved(contestants, listed, Pace(repeats, 0), clock)
    return SettingRuns("plain", [[p] for p in PROMPTS], listed, runs)


@pytest.mark.parametrize(
    ("after", "repeats", "kept"),
    [
        (1, 1, []),
        (5, 1, [(0, 0), (1, 0)]),
        (7, 1, [(0, 0), (1, 0), (2, 0)]),
        (11, 3, [(0, 0), (1, 0), (2, 0), (3, 0)]),  # one of two repeats, of all four jobs
        (17, 3, [(job, repeat) for repeat in (0, 1) for job in range(4)]),
    ],
)
def test_a_run_that_is_stopped_keeps_what_can_be_compared(
    after: int, repeats: int, kept: list[tuple[int, int]]
) -> None:
    clock, done = Clock(), []

    def tick(name: str) -> None:
        done.append(name)
        if len(done) == after:
            raise KeyboardInterrupt

    pair = [Fake("plain", clock, 0.4), Fake("fast", clock, 0.1)]
    with pytest.raises(Stopped) as caught:
        run_interleaved(pair, jobs(4), Pace(repeats, 0), clock, tick)
    found = caught.value.runs
    assert [(run.job, run.repeat) for run in found if run.contestant == "plain"] == kept
    assert [(run.job, run.repeat) for run in found if run.contestant == "fast"] == kept


def test_speedups_are_those_of_the_clock() -> None:
    clock = Clock()
    runs = observed([Fake("plain", clock, 0.4), Fake("fast", clock, 0.1)], clock)
    found = speedup(runs, "fast", all_seconds)
    assert found is not None
    assert found.mean == pytest.approx(5.0 / 2.0)
    decoding = speedup(runs, "fast", decode_seconds)
    assert decoding is not None
    assert decoding.mean == pytest.approx(4.0), "the prompt's own second is left out"
    assert speedup(runs, "plain", all_seconds) is None
    assert throughput(runs.of("fast"), 0, all_seconds) == pytest.approx(11 / 2.0)
    assert throughput(runs.of("fast"), 1, decode_seconds) == pytest.approx(10.0)


def test_each_job_has_its_own_speedup() -> None:
    clock = Clock(noise=0.1)
    runs = observed([Fake("plain", clock, 0.4), Fake("fast", clock, 0.1)], clock, repeats=2)
    found = speedup_by_job(runs, "fast")
    assert len(found) == len(runs.jobs)
    for job, ratio in enumerate(found):
        alone = speedup(runs, "fast", all_seconds, [job])
        assert alone is not None
        assert ratio == pytest.approx(alone.mean)
    assert speedup_by_job(runs, "plain") == ()


def test_a_against_a_contains_one_on_a_noisy_machine_that_drifts() -> None:
    inside = 0
    for seed in range(40):
        clock = Clock(noise=0.1, drift=0.002, rng=np.random.default_rng(seed))
        runs = observed([Fake("plain", clock, 0.1), Fake("plain again", clock, 0.1)], clock)
        found = speedup(runs, "plain again", all_seconds)
        assert found is not None
        inside += 1.0 in found
    assert inside >= 36


def test_drift_favours_nobody_where_blocks_would_be_off() -> None:
    clock = Clock(drift=0.02)
    runs = observed([Fake("plain", clock, 0.1), Fake("same", clock, 0.1)], clock, repeats=2)
    found = speedup(runs, "same", all_seconds)
    assert found is not None
    assert found.mean == pytest.approx(1.0, abs=0.01)
    assert 1.0 in found
    # One after the other, on the same machine, the second would seem to be slower by far.
    assert clock.now > 3 * 12 * 2 * 2


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_each_contestant_has_each_place_and_follows_each_other_equally_often(count: int) -> None:
    clock = Clock()
    names = ["plain", "a", "b", "c", "d", "e"][:count]
    turns_of_all = count * (1 + count % 2)
    listed = [Fake(name, clock, 0.1) for name in names]
    runs = run_interleaved(listed, jobs(turns_of_all), Pace(1, 0), clock)
    turns = [runs[i : i + count] for i in range(0, len(runs), count)]
    assert all({t.job for t in turn} == {i} for i, turn in enumerate(turns))
    assert all({t.contestant for t in turn} == set(names) for turn in turns)
    places = Counter((place, run.contestant) for turn in turns for place, run in enumerate(turn))
    assert len(places) == count * count
    assert len(set(places.values())) == 1
    follows = Counter((x.contestant, y.contestant) for turn in turns for x, y in pairwise(turn))
    assert len(follows) == count * (count - 1)
    assert len(set(follows.values())) == 1


def test_nobody_remembers_a_text_when_its_prompt_comes_again() -> None:
    clock = Clock()
    both = [Fake("plain", clock, 0.1), Fake("fast", clock, 0.1)]
    for each in both:
        each.run(jobs()[0])  # a warm-up
    observed(both, clock, repeats=3)
    assert [each.found_again for each in both] == [0, 0]
    assert all(len(each.seen) == 1 + 3 * 12 * 2 for each in both)


def test_one_job_is_resampled_over_its_repeats() -> None:
    clock = Clock(noise=0.1)
    one = jobs(1)
    pair = [Fake("plain", clock, 0.1), Fake("fast", clock, 0.05)]
    runs = SettingRuns("plain", [PROMPTS[:1]], one, run_interleaved(pair, one, Pace(6, 0), clock))
    found = speedup(runs, "fast", all_seconds)
    assert found is not None
    assert found.count == 6


class Hasty(Fake):
    """Makes the few tokens of a short text together with the first one."""

    def run(self, job: BatchJob) -> BatchTexts:
        before = self._clock.now
        made = super().run(job)
        if job.max_tokens < 4:
            self._clock.now = before + 1.0
        return made


def test_texts_of_a_round_or_two_do_not_say_how_fast_decoding_is() -> None:
    clock = Clock()
    listed = [replace(job, max_tokens=2 if n % 2 else 21) for n, job in enumerate(jobs())]
    both = [Fake("plain", clock, 0.1), Hasty("fast", clock, 0.05)]
    runs = SettingRuns(
        "plain", [[p] for p in PROMPTS], listed, run_interleaved(both, listed, Pace(1, 0), clock)
    )
    found = summarise(runs, both[1], SideMeasurements(gap=None)).decode_speedup
    assert found is not None
    assert (found.count, round(found.mean, 6)) == (6, 2.0)


def test_a_job_that_took_no_time_beside_its_first_token_is_left_out_alone() -> None:
    clock = Clock()
    both = [Fake("plain", clock, 0.4), Fake("fast", clock, 0.1)]
    runs = observed(both, clock)
    timed = [
        replace(run, first_seconds=run.seconds)
        if run.job == 3 and run.contestant == "fast"
        else run
        for run in runs.runs
    ]
    spoilt = replace(runs, runs=timed)
    found = summarise(spoilt, both[1], SideMeasurements()).decode_speedup
    assert found is not None
    assert (found.count, round(found.mean, 6)) == (11, 4.0)


def test_a_prediction_goes_by_the_jobs_that_it_is_compared_with() -> None:
    class Counted(Fake):
        """Counts its rounds, as our own methods do."""

        def run(self, job: BatchJob) -> BatchTexts:
            made = super().run(job)
            each, drafted = (5, 4) if self.name == "fast" and job.max_tokens > 4 else (1, 0)
            metrics = Metrics()
            for _ in range(-(-job.max_tokens // each)):
                metrics.count_round(drafted, drafted, each)
                metrics.count_positions(drafted, drafted)
            return replace(made, metrics=[metrics])

    clock = Clock()
    listed = [replace(job, max_tokens=2 if n % 2 else 21) for n, job in enumerate(jobs())]
    both = [Counted("plain", clock, 0.1), Counted("fast", clock, 0.05)]
    timed = run_interleaved(both, listed, Pace(1, 0), clock)
    runs = SettingRuns("plain", [[p] for p in PROMPTS], listed, timed)
    beside = SideMeasurements(times=Times(draft={4: 1.0}, verify={1: 1.0, 5: 1.0}))
    found = summarise(runs, both[1], beside).prediction
    assert found is not None
    # 20 plain rounds after the first, against 5 rounds of 2 seconds without the second of one.
    assert found.predicted == pytest.approx(20 / 9)


def test_texts_of_another_length_are_refused() -> None:
    clock = Clock()
    with pytest.raises(ConfigError, match="generated 12 tokens where 11"):
        run_interleaved([Fake("long", clock, 0.1, extra=1)], jobs(), Pace(1, 0), clock)


def test_a_benchmark_names_who_did_not_take_part() -> None:
    class OnlyOne(Fake):
        def refusal(self, batch: int, temperature: float) -> str | None:
            return "it runs batch 1 only" if batch > 1 else None

    clock = Clock()
    takers = [Fake("plain", clock, 0.4), OnlyOne("fast", clock, 0.1)]
    ticks: list[str] = []
    benchmark = Benchmark(
        BenchmarkPlan(batches=(1, 4), temperatures=(0.0,), max_tokens=11, max_prompt_tokens=3),
        PROMPTS,
        lambda text: [ord(c) for c in text],
        takers,
        clock=clock,
        tick=ticks.append,
    )
    one, four = (measured.result for measured in benchmark.run())
    assert len(ticks) <= benchmark.ticks()
    assert [m.name for m in one.methods] == ["plain", "fast"]
    assert one.methods[1].identity is not None
    assert one.methods[1].identity.identical == 12
    assert [t.task for t in one.methods[1].tasks] == ["task 0", "task 1", "task 2"]
    assert four.refused == {"fast": "it runs batch 1 only"}
    assert [m.name for m in four.methods] == ["plain"]
    assert four.methods[0].tokens_per_second == pytest.approx(4 * 11 / 5.0)
    assert all(len(p) <= 3 for job in takers[0].seen for p in job.prompts)


def test_prompts_that_fill_no_batch_are_left_out_and_counted() -> None:
    fast = Fake("plain", Clock(), 0.4)
    plan = BenchmarkPlan(batches=(5,), max_tokens=11)
    made = Benchmark(plan, PROMPTS, lambda text: [ord(c) for c in text], [fast], clock=Clock())
    result = made.run()[0].result
    assert (result.prompts, result.left_over) == (10, 2)
    asked = [prompt for job in fast.seen[-3::2] for prompt in job.prompts]
    assert len(set(asked)) == len(asked) == 10
    assert list(notes(result)) == ["Prompts that fill no batch of 5, and were not run: 2."]


def test_several_texts_of_a_prompt_stand_side_by_side_in_a_batch() -> None:
    fast = Fake("plain", Clock(), 0.4)
    plan = BenchmarkPlan(batches=(4,), temperatures=(0.8,), max_tokens=11, samples=2)
    benchmark = Benchmark(plan, PROMPTS, lambda text: list(map(ord, text)), [fast], clock=Clock())
    measured = benchmark.run()[0]
    assert title(measured.result).startswith(
        "batch 4, temperature 0.8: 12 prompts, 2 texts of each"
    )
    assert measured.result.left_over == 0
    assert len(measured.runs.jobs) == 6
    for job, prompts in zip(measured.runs.jobs, measured.runs.prompts, strict=True):
        assert job.samples == 2
        assert job.prompts[::2] == job.prompts[1::2]
        assert len(set(job.prompts)) == 2
        assert [tuple(map(ord, prompt.text)) for prompt in prompts] == list(job.prompts)


def test_a_benchmark_without_a_baseline_is_refused() -> None:
    with pytest.raises(ConfigError, match="'plain'"):
        Benchmark(BenchmarkPlan(), PROMPTS, lambda t: [1], [Fake("fast", Clock(), 1.0)]).run()


@pytest.mark.parametrize(
    "plan",
    [
        {"batches": ()},
        {"batches": (0,)},
        {"temperatures": (-1.0,)},
        {"temperatures": (float("nan"),)},
        {"temperatures": (0.0, float("inf"))},
        {"max_tokens": 1},
        {"max_prompt_tokens": 0},
        {"samples": 0},
        {"samples": 2},
        {"samples": 2, "batches": (4, 3), "temperatures": (1.0,)},
        {"samples": 2, "batches": (4,), "temperatures": (1.0, 0.0)},
    ],
)
def test_bad_plans_are_refused(plan: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="--"):
        BenchmarkPlan(**plan)  # type: ignore[arg-type]


def test_each_setting_is_run_once() -> None:
    plan = BenchmarkPlan(batches=(1, 2, 1), temperatures=(0.0, 0.0))
    assert plan.settings == [(1, 0.0), (2, 0.0)]


def test_bad_paces_are_refused() -> None:
    with pytest.raises(ConfigError, match="--repeats"):
        Pace(0)
