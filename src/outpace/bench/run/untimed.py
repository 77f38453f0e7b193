"""What is measured of an engine besides its timed runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outpace.bench.report.results import unmeasured
from outpace.bench.run.contest import BatchJob, Contestant
from outpace.bench.run.meter import Meter
from outpace.bench.run.ours import Ours
from outpace.bench.run.schedule import TimedRun
from outpace.bench.stats.divergence import Divergence, watching
from outpace.bench.stats.rounds import total_rounds
from outpace.bench.stats.theory import Times

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
        self, engine: Ours, jobs: Sequence[BatchJob], baseline: Contestant, meter: Meter | None
    ) -> None:
        """meter: of the engine's parts; None where these have no price of their own."""
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


def _plain_texts(engine: Ours, jobs: Sequence[BatchJob], baseline: Contestant) -> Texts | None:
    """What plain decoding writes for these jobs with the noise of an engine's rule; None where no
    sampled text has to be that one, or it is the baseline's."""
    same = engine.same_text_when_sampled and jobs[0].temperature > 0
    if not same or baseline.same_text_when_sampled:
        return None
    plain = Ours(engine.llm, engine.name, "off", shared=True)
    return [plain.run(job).texts for job in jobs]


def _spread(jobs: Sequence[BatchJob]) -> list[BatchJob]:
    """Returns the jobs in another order, in which the first few come from all parts of the list."""
    step = max(1, round(len(jobs) ** 0.5))
    return [job for first in range(step) for job in jobs[first::step]]


def _divergence(contestant: Ours, jobs: Sequence[BatchJob]) -> Divergence:
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
