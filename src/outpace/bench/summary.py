"""From timed runs to what a report says about each contestant."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from outpace.bench.contest import BatchJob, Contestant, TimedRun
from outpace.bench.divergence import Divergence
from outpace.bench.prompts import Prompt, task_of
from outpace.bench.results import MethodResult, Prediction, Roof, TaskResult
from outpace.bench.roofline import Traffic, bound_seconds
from outpace.bench.statistics import (
    AcceptanceCounts,
    Gap,
    Identity,
    Interval,
    acceptance,
    compare,
    geometric_mean,
    interval_of,
    predicted_seconds,
    split,
    total_rounds,
)
from outpace.bench.theory import Times, acceptance_of
from outpace.core.account import Account

LONG_ENOUGH = 8
"""Tokens of a job that says how fast decoding is, if any job has as many: one of two or three is a
round or two, and may take no time at all besides its prompt's pass."""

Seconds = Callable[[TimedRun], float]
"""Which of a run's times is meant: `all_seconds` or `decode_seconds`."""


def all_seconds(run: TimedRun) -> float:
    """Returns the seconds of a run, the prompts' own passes included."""
    return run.seconds


def decode_seconds(run: TimedRun) -> float:
    """Returns the seconds of all tokens of a run but the first of each text."""
    return run.decode_seconds


@dataclass(frozen=True)
class SettingRuns:
    """All timed runs at one batch size and temperature.

    ``prompts[j]`` are the prompts of ``jobs[j]``.
    """

    baseline: str
    prompts: Sequence[Sequence[Prompt]]
    jobs: Sequence[BatchJob]
    runs: Sequence[TimedRun]

    def of(self, name: str, job: int | None = None) -> list[TimedRun]:
        """Returns a contestant's runs of one job or of all, sorted by job and repeat."""
        jobs = range(len(self.jobs)) if job is None else (job,)
        return [run for one in jobs for run in self._by_job.get((name, one), ())]

    @cached_property
    def _by_job(self) -> Mapping[tuple[str, int], Sequence[TimedRun]]:
        """The runs by contestant and job: a long benchmark has thousands, and each is asked for
        several times."""
        found: dict[tuple[str, int], list[TimedRun]] = defaultdict(list)
        for run in sorted(self.runs, key=lambda run: run.repeat):
            found[run.contestant, run.job].append(run)
        return dict(found)

    @property
    def context(self) -> float:
        """Mean number of cached tokens of a row, halfway through its text."""
        lengths = [len(prompt) for job in self.jobs for prompt in job.prompts]
        tokens = sum(job.max_tokens for job in self.jobs) / len(self.jobs)
        return sum(lengths) / len(lengths) + tokens / 2


def speedup(
    runs: SettingRuns,
    name: str,
    seconds: Seconds,
    jobs: Sequence[int] | None = None,
    over: str | None = None,
) -> Interval | None:
    """Returns how much faster a contestant is than the baseline or than the contestant ``over``.

    jobs: the jobs that count; unset: all. Each job gives one ratio, the geometric mean over its
    repeats, of runs that were made side by side. With one job the interval is over its repeats.
    None for the baseline itself, and where decoding took no time because texts have one token.
    """
    ratios = _ratios(runs, name, seconds, jobs, over)
    if not ratios:
        return None
    return interval_of(ratios[0] if len(ratios) == 1 else [geometric_mean(r) for r in ratios])


def speedup_by_job(runs: SettingRuns, name: str) -> tuple[float, ...]:
    """Returns a contestant's speed-up over the baseline on each job, the geometric mean over its
    repeats; nothing for the baseline itself."""
    return tuple(map(geometric_mean, _ratios(runs, name, all_seconds)))


def _ratios(
    runs: SettingRuns,
    name: str,
    seconds: Seconds,
    jobs: Sequence[int] | None = None,
    over: str | None = None,
) -> list[list[float]]:
    """Returns the ratios of neighbouring runs of each job, by what they took for a token, nothing
    where there are none; for the arguments see `speedup`."""
    other = over or runs.baseline
    if name == other:
        return []
    pairs = [
        [
            (_per_token(slow, seconds), _per_token(fast, seconds))
            for slow, fast in zip(runs.of(other, job), runs.of(name, job), strict=True)
        ]
        for job in (range(len(runs.jobs)) if jobs is None else jobs)
    ]
    if not pairs or min(min(pair) for of_job in pairs for pair in of_job) <= 0:
        return []
    return [[slow / fast for slow, fast in of_job] for of_job in pairs]


def _per_token(run: TimedRun, seconds: Seconds) -> float:
    """Seconds of a run for each of its tokens: texts that end by themselves may differ in length,
    if a program rounds in another way."""
    return seconds(run) / sum(map(len, run.made.texts))


def throughput(runs: Sequence[TimedRun], skipped: int, seconds: Seconds) -> float | None:
    """Returns tokens per second, leaving out the first ``skipped`` tokens of each text."""
    tokens = sum(len(text) - skipped for run in runs for text in run.made.texts)
    total = sum(map(seconds, runs))
    return tokens / total if tokens and total > 0 else None


def counted(runs: Sequence[TimedRun]) -> AcceptanceCounts | None:
    """Returns the acceptance over runs; None where nothing was drafted or nothing was counted."""
    found = acceptance(metrics for run in runs for metrics in run.made.metrics)
    return found if found.drafted else None


def account(runs: Sequence[TimedRun]) -> Account | None:
    """Returns what texts were drafted with over runs; None where nobody says that."""
    return Account.merged(metrics.account for run in runs for metrics in run.made.metrics)


def tasks(runs: SettingRuns, name: str) -> tuple[TaskResult, ...]:
    """Returns a contestant's results by task."""
    by_task: dict[str, list[int]] = {}
    for job, prompts in enumerate(runs.prompts):
        by_task.setdefault(task_of(prompts), []).append(job)
    found = []
    for task, jobs in by_task.items():
        own = [run for job in jobs for run in runs.of(name, job)]
        found.append(
            TaskResult(
                task,
                speedup(runs, name, all_seconds, jobs),
                throughput(own, 0, all_seconds) or 0.0,
                counted(own),
            )
        )
    return tuple(found)


def identity(
    runs: SettingRuns,
    contestant: Contestant,
    gap: Gap | None,
    own: Sequence[Sequence[Sequence[int]]] | None = None,
) -> Identity | None:
    """Returns how many texts equal the baseline's; None where they need not be equal.

    Greedy texts must be equal, and sampled ones of a rule that reuses the target's own noise. own:
    plain decoding's texts of each job with that noise, where the baseline draws its tokens in
    another way.
    """
    sampled = runs.jobs[0].temperature > 0
    fixed = contestant.same_text_when_sampled and contestant.rule is not None
    if contestant.name == runs.baseline or (sampled and not fixed):
        return None
    names, prompts, expected, found = [], [], [], []
    for run in runs.of(contestant.name):
        first = runs.of(runs.baseline, run.job)[0]
        for row, prompt in enumerate(runs.prompts[run.job]):
            names.append(prompt.id)
            prompts.append(runs.jobs[run.job].prompts[row])
            expected.append((first.made.texts if own is None else own[run.job])[row])
            found.append(run.made.texts[row])
    return compare(names, prompts, expected, found, gap)


def decoding_jobs(runs: SettingRuns, name: str) -> list[int]:
    """Returns the jobs that say how fast a contestant decodes: those of `LONG_ENOUGH` tokens or
    more where there are any, without those that took no time besides their first token."""
    least = min(LONG_ENOUGH, max(job.max_tokens for job in runs.jobs))
    return [
        number
        for number, job in enumerate(runs.jobs)
        if job.max_tokens >= least
        and all(
            run.decode_seconds > 0
            for run in (*runs.of(name, number), *runs.of(runs.baseline, number))
        )
    ]


def prediction(
    runs: SettingRuns,
    name: str,
    times: Times | None,
    measured: Interval | None,
    jobs: Sequence[int],
) -> Prediction | None:
    """Returns the decode speed-up that the rounds of these jobs should have had by the times of
    their parts. measured: the one that the same jobs had."""
    own = [run for job in jobs for run in runs.of(name, job)]
    drafting = counted(own)
    if times is None or measured is None or drafting is None:
        return None
    rounds = total_rounds(run.made.metrics for run in own)
    plain = total_rounds(run.made.metrics for job in jobs for run in runs.of(runs.baseline, job))
    # The measured time of decoding leaves out a run of one token, which is one plain pass.
    first = len(own) * times.verifying(1)
    return Prediction(
        predicted=(predicted_seconds(plain, times) - first)
        / (predicted_seconds(rounds, times) - first),
        measured=measured.mean,
        alpha=acceptance_of(drafting.accepted_per_position, drafting.judged_per_position),
        draft_seconds=tuple(sorted(times.draft.items())),
        verify_seconds=tuple(sorted(times.verify.items())),
    )


def roof(
    runs: SettingRuns,
    name: str,
    bandwidth: float | None,
    target: Traffic | None,
    drafter: Traffic | None,
) -> Roof | None:
    """Returns how near a contestant comes to the speed at which its bytes can be read.

    bandwidth: in bytes per second. None where it or the bytes of a pass are unknown.
    """
    own = runs.of(name)
    rounds = total_rounds(run.made.metrics for run in own)
    reached = throughput(own, 1, decode_seconds)
    if bandwidth is None or target is None or not rounds or reached is None:
        return None
    seconds = bound_seconds(
        rounds, len(runs.jobs[0].prompts), runs.context, bandwidth, target, drafter
    )
    tokens = sum(len(text) for run in own for text in run.made.texts)
    return Roof(tokens / seconds, reached / (tokens / seconds))


@dataclass(frozen=True)
class SideMeasurements:
    """What was measured about a contestant besides its timed runs; None for what was not."""

    gap: Gap | None = None
    times: Times | None = None
    bandwidth: float | None = None
    """Bytes per second."""
    target: Traffic | None = None
    drafter: Traffic | None = None
    divergence: Divergence | None = None
    peaks: Mapping[str, int] | None = None
    """Peak memory in bytes, by contestant."""
    own_plain: Sequence[Sequence[Sequence[int]]] | None = None
    """As ``own`` of `identity`."""
    peers: Sequence[str] = ()
    """Names of the contestants that are other programs."""


def summarise(
    runs: SettingRuns, contestant: Contestant, measured: SideMeasurements
) -> MethodResult:
    """Returns all that a report says about one contestant at one batch size and temperature."""
    name = contestant.name
    own = runs.of(name)
    long = decoding_jobs(runs, name)
    decoding = speedup(runs, name, decode_seconds, long)
    return MethodResult(
        name=name,
        what=contestant.what,
        rule=contestant.rule,
        lossless=contestant.lossless,
        tokens_per_second=throughput(own, 0, all_seconds) or 0.0,
        decode_tokens_per_second=throughput(own, 1, decode_seconds),
        speedup=speedup(runs, name, all_seconds),
        decode_speedup=decoding,
        speedup_by_job=speedup_by_job(runs, name),
        tasks=tasks(runs, name),
        acceptance=counted(own),
        split=split((run.seconds, run.made.metrics) for run in own),
        identity=identity(runs, contestant, measured.gap, measured.own_plain),
        divergence=measured.divergence,
        peak_bytes=(measured.peaks or {}).get(name),
        own_bytes=contestant.nbytes,
        over_peers={
            peer: ratio
            for peer in measured.peers
            if (ratio := speedup(runs, name, all_seconds, over=peer)) is not None
        },
        prediction=prediction(runs, name, measured.times, decoding, long),
        roof=roof(runs, name, measured.bandwidth, measured.target, measured.drafter),
        account=None if contestant.rule is None else account(own),
    )
