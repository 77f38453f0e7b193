"""The contestants of a benchmark, their jobs, and interleaved paired runs. All contestants run each
job one after another, in changing order."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Literal

from outpace.bench.roofline import peak_of
from outpace.core.params import SamplingParams
from outpace.core.progress import silent
from outpace.core.stats import Metrics
from outpace.errors import ConfigError
from outpace.llm import LLM
from outpace.outputs import CompletionOutput

BASELINE = "plain"
"""Name of the contestant that all others are compared with."""


@dataclass(frozen=True)
class BatchJob:
    """One batch of prompts ``[B][...]`` of token ids, each to be continued by exactly
    ``max_tokens`` tokens.

    If the target itself ends its one text there, ``most`` is how many tokens there might have been.
    Our own engine knows of no other number: whoever knows where a text ends drafts better than
    in use. samples: texts of each prompt, which stands as often as that, side by side. tasks: of
    each prompt, if they are known.
    """

    prompts: tuple[Sequence[int], ...]
    """Token ids; those of a chat know which tokens end its answer (`ChatIds`)."""
    max_tokens: int
    temperature: float
    seed: int = 0
    most: int | None = None
    samples: int = 1
    tasks: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class BatchTexts:
    """The texts of a job, and the counters of each where the contestant keeps any."""

    texts: list[list[int]]
    metrics: Sequence[Metrics] = ()


class Contestant(ABC):
    """A way of generating text. ``run`` returns when all tokens are on the host."""

    name: str
    what: str
    """One line for the report: which program, which settings."""
    lossless: bool = True
    rule: str | None = None
    """Name of the verification rule, for a contestant that is outpace itself."""
    ends_by_itself: bool = False
    """Whether it makes of a job with ``most`` as many tokens as its text has."""
    same_text_when_sampled: bool = False
    """Whether a sampled text follows from its seed and prompt alone, whatever is drafted."""

    @abstractmethod
    def run(self, job: BatchJob) -> BatchTexts:
        """Generates the texts of a job."""

    def forget_texts(self) -> None:
        """Forgets the texts that it has made, so that none of them helps when its prompt comes
        again."""

    def refusal(self, batch: int, temperature: float) -> str | None:
        """Returns why it cannot run such jobs, None if it can."""
        return None

    @property
    def nbytes(self) -> int | None:
        """Bytes of weights and caches that it needs, where it is known."""
        return None


# -- our own engine: speculative, and plain as the same engine with K = 0 ----------------------


Speculative = Literal["auto", "off"] | int | None


class OutpaceContestant(Contestant):
    """One `LLM` under one setting of ``SamplingParams.speculative``."""

    ends_by_itself = True

    def __init__(
        self, llm: LLM, name: str, speculative: Speculative = None, *, shared: bool = False
    ) -> None:
        """shared: whether other contestants of the same run use this LLM, too, so that it has to
        forget their texts before each of its own."""
        self.llm = llm
        self._shared = shared
        self.name = name
        self.speculative = speculative
        self._tagged = llm.config.method == "tagged"
        self.plain = speculative in ("off", 0) or llm.config.method == "none"
        rule = llm.engine.verifier.rule
        self.rule = None if self.plain else rule.name
        self.lossless = self.plain or rule.lossless
        self.same_text_when_sampled = llm.engine.verifier.coupled
        self.what = f"outpace, {'plain' if self.plain else describe(llm, speculative)}"

    def forget_texts(self) -> None:
        self.llm.forget_texts()

    def run(self, job: BatchJob) -> BatchTexts:
        if self._shared:
            self.forget_texts()
        found = self._texts(job, self._params(job))
        return BatchTexts([out.token_ids for out in found], [out.metrics for out in found])

    def length(self, job: BatchJob) -> int:
        """Returns how many tokens the longest text of a job has before the target ends it."""
        params = [replace(each, ignore_eos=False) for each in self._params(job)]
        return max(len(out.token_ids) for out in self._texts(job, params))

    def _texts(self, job: BatchJob, params: list[SamplingParams]) -> list[CompletionOutput]:
        prompts = job.prompts[:: job.samples]
        return [text for out in self.llm.generate(prompts, params) for text in out.outputs]

    def _params(self, job: BatchJob) -> list[SamplingParams]:
        """Options of each prompt, whose task is its tag where tags choose the drafter. Several
        texts of one have no seed where that would keep them from drafting for each other: what is
        drafted for a text with a seed follows from it alone."""
        tags = job.tasks[:: job.samples] if self._tagged else ()
        repeats = job.samples == 1 or self.plain or self.same_text_when_sampled
        return [
            SamplingParams(
                n=job.samples,
                temperature=job.temperature,
                max_tokens=job.most or job.max_tokens,
                ignore_eos=job.most is None,
                seed=job.seed + index if repeats else None,
                speculative=self.speculative,
                tag=tags[index] if tags else None,
            )
            for index in range(len(job.prompts) // job.samples)
        ]

    @property
    def nbytes(self) -> int:
        engine = self.llm.engine
        own = engine.target.weight_bytes + engine.target.cache_bytes
        return own if self.plain else own + engine.drafter.nbytes


def describe(llm: LLM, speculative: Speculative) -> str:
    """Returns drafter, draft length and rule in a line; of a path its last part: reports travel."""
    config = llm.config
    count = config.num_speculative_tokens if speculative is None else speculative
    options = ", ".join(
        f"{key}={Path(value).name if key == 'model' and isinstance(value, (str, Path)) else value}"
        for key, value in config.options.items()
    )
    options = f" ({options})" if options else ""
    return f"{config.method}{options}, K={count}, verify={llm.engine.verifier.rule.name}"


# -- interleaved runs --------------------------------------------------------------------------


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


def warm_up(
    contestants: Sequence[Contestant], job: BatchJob, pace: Pace, tick: Tick = silent
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
    tick: Tick = silent,
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


# -- the plan ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class BenchmarkPlan:
    """What to run. Raises ``ConfigError`` for values that cannot be run."""

    batches: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    max_tokens: int = 128
    to_end: bool = False
    """Whether a text ends where the target's own plain text does, if that is before
    ``max_tokens``: what is written after it repeats itself, and is drafted too easily."""
    max_prompt_tokens: int = 512
    pace: Pace = field(default_factory=Pace)
    seed: int = 0
    samples: int = 1
    """Texts of each prompt, written side by side: a batch holds 1 / ``samples`` as many prompts."""
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
