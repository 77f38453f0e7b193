"""Interleaved paired runs: all contestants run each job one after another, in changing order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from outpace.bench.run.contest import BatchJob, BatchTexts, Contestant
from outpace.bench.run.memory import peak_of
from outpace.errors import ConfigError

Clock = Callable[[], float]
"""Returns the present time in seconds."""
Tick = Callable[[str], None]
"""Is called after each run with a few words on it, to show progress."""


@dataclass(frozen=True, eq=False)
class TimedRun:
    """One contestant's run of one job."""

    contestant: str
    job: int
    repeat: int
    seconds: float
    first_seconds: float
    """Seconds of the same job with one token: the prompt, and one pass."""
    made: BatchTexts

    @property
    def decode_seconds(self) -> float:
        """Seconds of all tokens but the first."""
        return self.seconds - self.first_seconds


@dataclass(frozen=True)
class Pace:
    """How often each job is run: ``repeats`` times timed, after ``warmup`` untimed runs of the
    first job."""

    repeats: int = 1
    warmup: int = 1

    def __post_init__(self) -> None:
        if self.repeats < 1 or self.warmup < 0:
            raise ConfigError("--repeats must be at least 1 and --warmup at least 0.")


class Stopped(KeyboardInterrupt):
    """Ctrl-C while jobs were timed.

    ``runs`` are those that can be compared: of the jobs that all contestants have run and, of
    several repeats, of those that were finished for all jobs; in the first job there are none.
    """

    def __init__(self, runs: Sequence[TimedRun]) -> None:
        super().__init__()
        self.runs = runs


def ignore(what: str) -> None:
    """A `Tick` that shows nothing."""


def warm_up(
    contestants: Sequence[Contestant], job: BatchJob, pace: Pace, tick: Tick = ignore
) -> dict[str, int]:
    """Runs the job untimed, ``warmup`` times with each contestant.

    Returns the peak memory of each contestant in bytes.
    """
    peaks: dict[str, int] = {}
    for contestant in contestants:
        for _ in range(pace.warmup):
            with peak_of() as peak:
                contestant.run(job)
            peaks[contestant.name] = max(peaks.get(contestant.name, 0), peak.bytes)
            tick(f"warming up {contestant.name}")
    return peaks


def run_interleaved(
    contestants: Sequence[Contestant],
    jobs: Sequence[BatchJob],
    pace: Pace,
    clock: Clock = perf_counter,
    tick: Tick = ignore,
) -> list[TimedRun]:
    """Returns the timed runs of all jobs by all contestants.

    Within a job the contestants follow one another at once, in an order that changes from job to
    job (`_order`), so that a machine that gets faster or slower favours none of them, and none
    gains by what another one leaves in the caches of the processor. Before the jobs begin,
    and before they are repeated, all contestants forget the texts that they have made: a look-up
    may learn from other prompts' texts, as in use, but never finds the text that it is to write.

    Raises `Stopped` at Ctrl-C.
    """
    runs: list[TimedRun] = []
    comparable = 0
    try:
        for repeat in range(pace.repeats):
            for contestant in contestants:
                contestant.forget_texts()
            for number, job in enumerate(jobs):
                for contestant in _order(contestants, number + repeat):
                    runs.append(_timed(contestant, job, number, repeat, clock))
                    tick(contestant.name)
                if not repeat:
                    comparable = len(runs)
            comparable = len(runs)
    except KeyboardInterrupt as stop:
        raise Stopped(runs[:comparable]) from stop
    return runs


def _order(contestants: Sequence[Contestant], turn: int) -> Iterator[Contestant]:
    """Yields the contestants in the order of a turn.

    The turns are the rows of a Williams design (Williams 1949): after as many turns as there are
    contestants, or twice as many if their number is odd, each one has come equally often at each
    place, and equally often right after each other one.
    """
    count = len(contestants)
    # 0, 1, n - 1, 2, n - 2, ...: the steps from each to the next are all different.
    zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
    shift, mirrored = divmod(turn, 2) if count % 2 else (turn, 0)
    row = [contestants[(place + shift) % count] for place in zigzag]
    yield from reversed(row) if mirrored else row


def _timed(
    contestant: Contestant, job: BatchJob, number: int, repeat: int, clock: Clock
) -> TimedRun:
    first = replace(job, max_tokens=1, most=None)
    begin = clock()
    contestant.run(first)
    middle = clock()
    made = contestant.run(job)
    end = clock()
    free = job.most is not None and contestant.ends_by_itself
    for text in made.texts:
        if len(text) != job.max_tokens and not free:
            raise ConfigError(
                f"{contestant.name} generated {len(text)} tokens where {job.max_tokens} were asked "
                "for, and speeds of texts of different lengths cannot be compared: lower "
                "--max-tokens or --max-prompt-tokens, so that both fit into the model's context."
            )
    return TimedRun(contestant.name, number, repeat, end - middle, middle - begin, made)
