"""The training of one drafter: its target, its text, its bar and curves, and what is said at the
end."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from outpace.cli.flags.groups import ModelFlags
from outpace.cli.loading import starting
from outpace.cli.printing import say
from outpace.cli.progress import counting, in_quarters, working
from outpace.cli.train.answers import GIGABYTE, written
from outpace.cli.train.flags import EVERY, DrafterFlags, RunFlags, TextFlags

if TYPE_CHECKING:
    from torch import Tensor

    from outpace.targets.hf.loading.loaded import LoadedModel
    from outpace.train.distributed import Ranks
    from outpace.train.metrics import Metric, Progress
    from outpace.train.run import TrainingRun
    from outpace.train.settings import TrainSettings
    from outpace.train.state_cache import HiddenStateCache


@dataclass(frozen=True)
class Training:
    """What the runs of one command share."""

    console: Console
    target: LoadedModel
    settings: TrainSettings
    flags: RunFlags
    curves: Curves
    ranks: Ranks

    def check(self, folders: Iterable[Path], begun: bool, thorough: bool) -> None:
        """Raises ``ConfigError`` for settings that do not fit the target, or a run that is to go
        on, before anything is read. thorough: also where that takes some seconds."""
        from outpace.train.checkpoint import check_goes_on
        from outpace.train.students import check_made

        for folder in folders:
            check_goes_on(folder, self.settings, self.target)
        with working(self.console, "checking the sizes"):
            check_made(self.target, self.settings, begun, thorough)

    def read(self, text: TextFlags, drafter: DrafterFlags) -> tuple[Tensor, Tensor | None]:
        """Returns the blocks that a drafter learns from, written before if they are the target's
        own, and which tokens are the target's, where that is known."""
        from outpace.train.data import blocks, cut_answers, documents
        from outpace.train.run import held_out

        target, settings = self.target, self.settings
        found: tuple[Tensor, Tensor | None]
        if text.self_distill:
            answers = written(self.console, target, text, settings.seed, drafter.out, self.ranks)
            end = target.tokenizer.eos_token_id
            found = cut_answers(answers, end, settings.block, text.tokens)
        else:
            with working(self.console, "reading the text"):
                given = documents(text.data or [], target.tokenizer, target.name)
                found = blocks(given, target.tokenizer, settings.block, text.tokens), None
        held_out(len(found[0]), settings)
        return found

    def train(
        self,
        read: tuple[Tensor, Tensor | None],
        text: TextFlags,
        drafter: DrafterFlags,
        name: str,
    ) -> None:
        """Trains one drafter on what was `read`. name: of its curves."""
        from outpace.train.checkpoint import LOG
        from outpace.train.run import TrainingRun

        console, settings, flags = self.console, self.settings, self.flags
        tokens, own = read
        state_cache = self._state_cache(text)
        preparing = f"preparing {settings.method}"
        with working(console, preparing, lines=False) as report:
            run = TrainingRun(
                self.target,
                tokens,
                settings,
                drafter.out,
                own=own,
                state_cache=state_cache,
                ranks=self.ranks,
                preparing=report if console.is_terminal else in_quarters(console, preparing),
            )
        if run.step:
            console.print(_going_on(run, flags.patience))
        try:
            reached = self._played(run, name, drafter.out / LOG)
        except KeyboardInterrupt:
            say(console, _interrupted(run, drafter.out))
            raise
        console.print(
            f"{reached.tokens:,} tokens in {reached.seconds / 60:.1f} minutes; {_kept(run)}"
        )
        if state_cache is not None and state_cache.full:
            console.print(
                "the kept hidden states fill --cache: all others are computed again each time"
            )

    def _played(self, run: TrainingRun, name: str, log: Path) -> Progress:
        """Trains under a bar and returns where the run ended.

        It ends after its steps, after ``--minutes``, or after ``--patience`` reports without a
        higher figure than before, those of earlier sittings among them.
        """
        minutes = self.flags.minutes
        end = None if minutes is None else time.monotonic() + 60 * minutes
        with counting(self.console, "training", end) as steps:
            steps.expect(max(run.settings.steps, run.step), done=run.step)

            def report(reached: Progress) -> None:
                loss = f"loss {reached.loss:.3f}, " if reached.step else ""
                figure = f"{reached.metric.name} {reached.score:.2f}"
                steps.say(f"step {reached.step:,}: {loss}{figure}")
                self.curves.draw(name, log, reached.metric)

            def stop() -> bool:
                steps.at(run.step, "training")
                return end is not None and time.monotonic() > end

            reached = run.play(report, self.flags.every or EVERY, stop, self.flags.patience)
        self.curves.draw(name, log, reached.metric)  # also where there was nothing left to learn
        return reached

    def _state_cache(self, text: TextFlags) -> HiddenStateCache | None:
        """Where the target's hidden states are kept, if they are."""
        if text.hidden_states is None:
            return None
        from outpace.train.state_cache import HiddenStateCache
        from outpace.train.teacher import signature_of

        return HiddenStateCache(
            text.hidden_states, signature_of(self.target), int(text.cache * GIGABYTE)
        )


def load_target(console: Console, model: ModelFlags, sharing: Ranks | None) -> LoadedModel:
    """Returns the target, with a tokenizer. sharing: the processes that it is split over, if it
    is."""
    with starting(console):
        from outpace.errors import PromptError
        from outpace.llm import BUNDLED
        from outpace.targets.cpu.threads import use_threads
        from outpace.targets.hf.loading.load import load
        from outpace.targets.hf.loading.reading import hide_progress_bars
    arguments = model.arguments()
    use_threads(arguments.pop("threads", None))
    name = BUNDLED / "target" if model.model is None else model.model
    local = model.model is None or os.path.exists(model.model)
    hide_progress_bars(downloads=local or console.quiet or not console.is_terminal)
    with working(console, f"loading {model.model or 'the bundled target'}") as report:
        if sharing is None:
            target = load(name, progress=report, **arguments)
        else:
            from outpace.train.distributed import load_sharded

            del arguments["quantization"]  # nothing by now
            target = load_sharded(str(name), sharing, progress=report, **arguments)
    if target.tokenizer is None:
        raise PromptError(f"{target.name} has no tokenizer, so no text can be read for it.")
    return target


def _going_on(run: TrainingRun, patience: int | None) -> str:
    """What becomes of a run of an earlier sitting."""
    steps = run.settings.steps
    if run.step > steps:
        return (
            f"this run is at step {run.step:,}, beyond --steps {steps:,}: nothing more is learned; "
            "with more --steps it goes on"
        )
    if patience is not None and run.stale >= patience and run.step < steps:
        return (
            f"the last {run.stale:,} report(s) of this run have brought no better figure: nothing "
            "more is learned; with more --patience it goes on"
        )
    return f"going on from step {run.step:,} of {steps:,}"


def _kept(run: TrainingRun) -> str:
    """Which weights are kept, with their own figure: the best need not be the last."""
    assert run.kept is not None  # each run keeps what it first reports
    return f"kept is step {run.kept.step:,}: {run.kept.sentence}"


def _interrupted(run: TrainingRun, out: Path) -> str:
    """What an interrupted run leaves."""
    if run.written is None:
        return "interrupted before the first report: nothing is kept (--every makes them sooner)"
    return (
        f"interrupted; {_kept(run)}, in {out}. The same command goes on from step {run.written:,}."
    )


class Curves:
    """Draws the curves of one run or of several as one image, from the logs that they leave: the
    reports of earlier sittings are among them."""

    def __init__(
        self, console: Console, png: Path | None, read: Sequence[Path] = (), draws: bool = True
    ) -> None:
        """png: the image; None: nothing is drawn. read: files that stay as they are. draws: whether
        this process does; of several all check. Raises ``ConfigError`` where it cannot be written
        or drawn, before hours are spent.
        """
        self._console, self._png = console, png if draws else None
        self._reports: dict[str, list[dict[str, Any]]] = {}
        if png is not None:
            from outpace.bench.outputs import check_distinct, check_file
            from outpace.bench.plots import require_matplotlib

            check_distinct({"--png": png}, read)
            check_file("--png", png)
            require_matplotlib()

    def draw(self, name: str, log: Path, metric: Metric) -> None:
        """Draws the curves of a run as far as it is, with those of the runs drawn before."""
        if self._png is None or not log.exists():
            return
        from outpace.bench.plots import training_figure

        try:
            self._reports[name] = list(_reports(log, metric.key))
            self._png.write_bytes(training_figure(self._reports, metric.key))
        except OSError as error:  # which is no reason to end what has learned for hours
            self._console.print(f"--png: {error}; no more curves are drawn.", markup=False)
            self._png = None


def _reports(log: Path, key: str) -> Iterator[dict[str, Any]]:
    """Yields the reports of a log, but for a line that a killed run has left unfinished. key: the
    metric that each has."""
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            report = json.loads(line)
            if isinstance(report, dict) and {"tokens", "loss", key} <= {*report}:
                yield report
