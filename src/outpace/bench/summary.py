"""From trials to what a report says about each contestant."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from outpace.bench.contest import Contestant, Job
from outpace.bench.divergence import Divergence
from outpace.bench.identity import Gap, Identity, compare
from outpace.bench.interval import Interval, geometric_mean, interval_of
from outpace.bench.prompts import Prompt, task_of
from outpace.bench.results import MethodResult, Prediction, Roof, TaskResult
from outpace.bench.roofline import Traffic, bound_seconds
from outpace.bench.rounds import (
    Acceptance,
    acceptance,
    predicted_seconds,
    split,
    total_rounds,
)
from outpace.bench.schedule import Trial
from outpace.bench.theory import Times, acceptance_of

Seconds = Callable[[Trial], float]


def whole(trial: Trial) -> float:
    """All seconds of a trial."""
    return trial.seconds


def decode(trial: Trial) -> float:
    """The seconds of all tokens but the first."""
    return trial.decode_seconds


@dataclass(frozen=True)
class Observed:
    """All that was seen in one cell."""

    baseline: str
    units: Sequence[Sequence[Prompt]]
    jobs: Sequence[Job]
    trials: Sequence[Trial]

    def of(self, name: str, unit: int | None = None) -> list[Trial]:
        """Returns a contestant's trials, of one job or of all, by job and repeat."""
        found = [t for t in self.trials if t.contestant == name and (unit is None or t.job == unit)]
        return sorted(found, key=lambda t: (t.job, t.repeat))

    @property
    def context(self) -> float:
        """Mean cached tokens of a row, halfway through its text."""
        lengths = [len(prompt) for job in self.jobs for prompt in job.prompts]
        return sum(lengths) / len(lengths) + self.jobs[0].max_tokens / 2


def speedup(
    seen: Observed,
    name: str,
    seconds: Seconds,
    units: Sequence[int] | None = None,
    over: str | None = None,
) -> Interval | None:
    """Returns how much faster than the baseline (or ``over``), over jobs; None for itself.

    Each job gives one ratio, the geometric mean over its repeats of trials that ran side by side.
    With one job the repeats take the jobs' place.
    """
    other = over or seen.baseline
    if name == other:
        return None
    pairs = [
        [
            (seconds(plain), seconds(fast))
            for plain, fast in zip(seen.of(other, unit), seen.of(name, unit), strict=True)
        ]
        for unit in (range(len(seen.jobs)) if units is None else units)
    ]
    if not pairs or min(min(pair) for unit in pairs for pair in unit) <= 0:
        return None  # a text of one token has no decoding
    ratios = [[plain / fast for plain, fast in unit] for unit in pairs]
    return interval_of(ratios[0] if len(ratios) == 1 else [geometric_mean(r) for r in ratios])


def throughput(trials: Sequence[Trial], skipped: int, seconds: Seconds) -> float | None:
    """Returns tokens per second, leaving out ``skipped`` tokens of each text."""
    tokens = sum(len(text) - skipped for trial in trials for text in trial.outcome.texts)
    total = sum(map(seconds, trials))
    return tokens / total if tokens and total > 0 else None


def counted(trials: Sequence[Trial]) -> Acceptance | None:
    """Returns the acceptance, None where nothing was drafted or nobody counted."""
    found = acceptance(m for trial in trials for m in trial.outcome.metrics)
    return found if found.drafted else None


def tasks(seen: Observed, name: str) -> tuple[TaskResult, ...]:
    """Returns each task's part."""
    by_task: dict[str, list[int]] = {}
    for index, unit in enumerate(seen.units):
        by_task.setdefault(task_of(unit), []).append(index)
    found = []
    for task, units in by_task.items():
        trials = [trial for unit in units for trial in seen.of(name, unit)]
        found.append(
            TaskResult(
                task,
                speedup(seen, name, whole, units),
                throughput(trials, 0, whole) or 0.0,
                counted(trials),
            )
        )
    return tuple(found)


def identity(seen: Observed, contestant: Contestant, gap: Gap | None) -> Identity | None:
    """Returns whether the texts are the baseline's, where they must be: greedy, or keyed noise."""
    sampled = seen.jobs[0].temperature > 0
    keyed = contestant.same_text_when_sampled and contestant.rule is not None
    if contestant.name == seen.baseline or (sampled and not keyed):
        return None
    names, prompts, expected, found = [], [], [], []
    for trial in seen.of(contestant.name):
        first = seen.of(seen.baseline, trial.job)[0]
        for index, prompt in enumerate(seen.units[trial.job]):
            names.append(prompt.id)
            prompts.append(seen.jobs[trial.job].prompts[index])
            expected.append(first.outcome.texts[index])
            found.append(trial.outcome.texts[index])
    return compare(names, prompts, expected, found, gap)


def prediction(
    seen: Observed, name: str, times: Times | None, measured: Interval | None
) -> Prediction | None:
    """Returns the speed-up that rounds like these should have had, by their parts' own times."""
    trials = seen.of(name)
    drafting = counted(trials)
    if times is None or measured is None or drafting is None:
        return None
    rounds = total_rounds(trial.outcome.metrics for trial in trials)
    plain = total_rounds(trial.outcome.metrics for trial in seen.of(seen.baseline))
    # What is measured leaves out the time of a text of one token, a plain pass, on both sides.
    first = len(trials) * times.verifying(1)
    return Prediction(
        predicted=(predicted_seconds(plain, times) - first)
        / (predicted_seconds(rounds, times) - first),
        measured=measured.mean,
        alpha=acceptance_of(drafting.accepted_per_position, drafting.drafted_per_position),
        draft_seconds=tuple(sorted(times.draft.items())),
        verify_seconds=tuple(sorted(times.verify.items())),
    )


def roof(
    seen: Observed,
    name: str,
    bandwidth: float | None,
    target: Traffic | None,
    drafter: Traffic | None,
) -> Roof | None:
    """Returns the fraction of the speed that memory alone would allow for these rounds."""
    trials = seen.of(name)
    rounds = total_rounds(trial.outcome.metrics for trial in trials)
    reached = throughput(trials, 1, decode)
    if bandwidth is None or target is None or not rounds or reached is None:
        return None
    seconds = bound_seconds(
        rounds, len(seen.jobs[0].prompts), seen.context, bandwidth, target, drafter
    )
    tokens = sum(len(text) for trial in trials for text in trial.outcome.texts)
    return Roof(tokens / seconds, reached / (tokens / seconds))


@dataclass(frozen=True)
class Known:
    """What is known about a contestant besides its trials."""

    gap: Gap | None = None
    times: Times | None = None
    bandwidth: float | None = None
    target: Traffic | None = None
    drafter: Traffic | None = None
    divergence: Divergence | None = None
    peaks: Mapping[str, int] | None = None
    peers: Sequence[str] = ()
    """Names of contestants that are not ours."""


def summarise(seen: Observed, contestant: Contestant, known: Known) -> MethodResult:
    """Returns all that a report says about one contestant in one cell."""
    name = contestant.name
    trials = seen.of(name)
    decoding = speedup(seen, name, decode)
    return MethodResult(
        name=name,
        what=contestant.what,
        rule=contestant.rule,
        lossless=contestant.lossless,
        tokens_per_second=throughput(trials, 0, whole) or 0.0,
        decode_tokens_per_second=throughput(trials, 1, decode),
        speedup=speedup(seen, name, whole),
        decode_speedup=decoding,
        tasks=tasks(seen, name),
        acceptance=counted(trials),
        split=split((trial.seconds, trial.outcome.metrics) for trial in trials),
        identity=identity(seen, contestant, known.gap),
        divergence=known.divergence,
        peak_bytes=(known.peaks or {}).get(name),
        own_bytes=contestant.nbytes,
        over_peers={
            peer: ratio
            for peer in known.peers
            if (ratio := speedup(seen, name, whole, over=peer)) is not None
        },
        prediction=prediction(seen, name, known.times, decoding),
        roof=roof(seen, name, known.bandwidth, known.target, known.drafter),
    )
