"""Interleaved paired runs: every contestant does every job, close in time and in changing order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

from outpace.bench.contest import Contestant, Job, Outcome
from outpace.bench.memory import peak_of
from outpace.errors import ConfigError

Clock = Callable[[], float]
Tick = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Trial:
    """One contestant's run of one job."""

    contestant: str
    job: int
    repeat: int
    seconds: float
    first_seconds: float
    """Seconds of the same job with one token: the prompt, and one pass."""
    outcome: Outcome

    @property
    def decode_seconds(self) -> float:
        """Seconds of all tokens but the first."""
        return self.seconds - self.first_seconds


@dataclass(frozen=True)
class Pace:
    """How often to run what."""

    repeats: int = 1
    warmup: int = 1

    def __post_init__(self) -> None:
        if self.repeats < 1 or self.warmup < 0:
            raise ConfigError("--repeats must be at least 1 and --warmup at least 0.")


def ignore(what: str) -> None:
    """Takes no notice of progress."""


def warm_up(
    contestants: Sequence[Contestant], job: Job, pace: Pace, tick: Tick = ignore
) -> dict[str, int]:
    """Runs the job untimed, ``warmup`` times each; returns the peak memory of each contestant."""
    peaks: dict[str, int] = {}
    for contestant in contestants:
        for _ in range(pace.warmup):
            with peak_of() as peak:
                contestant.run(job)
            peaks[contestant.name] = max(peaks.get(contestant.name, 0), peak.bytes)
            tick(f"warming up {contestant.name}")
    return peaks


def play(
    contestants: Sequence[Contestant],
    jobs: Sequence[Job],
    pace: Pace,
    clock: Clock = perf_counter,
    tick: Tick = ignore,
) -> list[Trial]:
    """Returns all trials. Within a job the contestants follow one another at once, in an order that
    changes from job to job, so that a machine that drifts favours none of them."""
    trials = []
    for repeat in range(pace.repeats):
        for number, job in enumerate(jobs):
            for contestant in _turn(contestants, number + repeat):
                trials.append(_trial(contestant, job, number, repeat, clock))
                tick(contestant.name)
    return trials


def _turn(contestants: Sequence[Contestant], turn: int) -> Iterator[Contestant]:
    """Forward and backward in turns, and rotated: each goes first, and behind each other one."""
    order = list(contestants) if turn % 2 == 0 else list(reversed(contestants))
    shift = (turn // 2) % len(order)
    yield from order[shift:] + order[:shift]


def _trial(contestant: Contestant, job: Job, number: int, repeat: int, clock: Clock) -> Trial:
    first = Job(job.prompts, 1, job.temperature, job.seed)
    begin = clock()
    contestant.run(first)
    middle = clock()
    outcome = contestant.run(job)
    end = clock()
    for text in outcome.texts:
        if len(text) != job.max_tokens:
            raise ConfigError(
                f"{contestant.name} generated {len(text)} tokens where {job.max_tokens} were asked "
                "for: speeds of texts of different lengths cannot be compared."
            )
    return Trial(contestant.name, number, repeat, end - middle, middle - begin, outcome)
