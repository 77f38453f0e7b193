"""``outpace train``: a drafter for one target, trained on given text or on the target's own."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

from outpace.cli.flags.grouped import grouped
from outpace.cli.flags.groups import ModelFlags
from outpace.cli.loading import starting
from outpace.cli.signs import working
from outpace.cli.training.bar import in_lines, play
from outpace.cli.training.curves import Curves
from outpace.cli.training.flags import (
    DrafterFlags,
    OnlineFlags,
    ProcessFlags,
    RunFlags,
    TextFlags,
)
from outpace.cli.training.launch import Launch
from outpace.cli.training.online import train_online
from outpace.cli.training.out import taken
from outpace.cli.training.self_distill import GIGABYTE, written
from outpace.cli.training.tasks import files_of, one_task, train_router, write_routes
from outpace.errors import ConfigError, OutpaceError

if TYPE_CHECKING:
    from torch import Tensor

    from outpace.targets.cpu.weights.quantize import Quantization
    from outpace.targets.hf.loading.loaded import Loaded
    from outpace.train.lessons import Lessons
    from outpace.train.ranks import Ranks
    from outpace.train.run import Progress, TrainingRun
    from outpace.train.settings import TrainSettings


@grouped
def train(
    *,
    method: Annotated[
        str,
        typer.Argument(
            help="draft_model, a head (eagle3, hydra, medusa, ...), or a classifier of drafted "
            "tokens: judge, stop_head (docs/training.md)."
        ),
    ],
    model: ModelFlags,
    text: TextFlags,
    drafter: DrafterFlags,
    run: RunFlags,
    processes: ProcessFlags,
    online: OnlineFlags,
) -> None:
    """Train a drafter for one target, a head over its hidden states or a small model, or what
    judges drafted tokens.

    Each report says how many tokens a pass of the target would bring with the drafter's guesses, on
    text that it does not learn from; of a classifier, how many tokens it tells rightly.
    Ctrl-C or SIGTERM keeps what the last report wrote.

    `outpace train eagle3 -m big-model --data chats.jsonl --self-distill --out head`

    `outpace train draft_model -m big-model --data prose.txt --out small --set layers=2`

    `outpace train eagle3 -m big-model --for code=code.jsonl --for maths=maths.jsonl --out heads`

    `outpace train eagle3 -m big-model --data today.jsonl --online --start head --out newer`

    `torchrun --nproc-per-node=4 -m outpace train eagle3 ...` shares it out among four GPUs.
    """
    launch = Launch.of(os.environ)
    text.check(online.online)
    launch.check(method, text, online)
    if processes.shard_target:
        launch.check_shards(method, model, drafter)
    with launch.stopping():
        if online.online:
            console = launch.console()
            with taken(console, model, drafter.out, [(text, drafter)], online=True):
                train_online(console, method, model, text, drafter, run, online)
        elif online.learner is not None:
            raise ConfigError("--learner is about --online: leave it out, or add that.")
        else:
            _train(launch, method, model, text, drafter, run, processes)


def _train(
    launch: Launch,
    method: str,
    model: ModelFlags,
    text: TextFlags,
    drafter: DrafterFlags,
    run: RunFlags,
    processes: ProcessFlags,
) -> None:
    """Trains on text, which the target may write itself."""
    console, ranks = launch.console(), launch.ranks
    files = files_of(method, text)
    settings = _settings(console, method, model, drafter, run.filled())
    _check_lessons(method, text)
    ranks.check(settings.batch)
    own = {task: one_task(task, files, text, drafter) for task in files}
    runs = list(own.values()) or [(text, drafter)]
    folders = [made.out for _, made in runs]
    with taken(console, model, drafter.out, runs, first=ranks.first):
        begun = _have_begun(settings, folders)
        curves = Curves(console, run.png, draws=ranks.first)
        model = launch.placed(model)
        with ranks.joined(model.device):
            target = _target(console, model, ranks if processes.shard_target else None)
            training = _Training(console, target, settings, run, curves, ranks)
            training.check(folders, begun, thorough=text.self_distill)
            if own:
                training.train_tasks(own, files, text, drafter)
            else:
                training.train(training.read(text, drafter), text, drafter, method)
                _say(console, f"use it: {_use(settings, drafter)}")


def _say(console: Console, line: str) -> None:
    """Prints a line that may be copied: no markup, and no break."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def _check_lessons(method: str, text: TextFlags) -> None:
    from outpace.heads.registry import classifier_names

    if text.lessons is not None and method in classifier_names():
        raise ConfigError(
            f"--lessons is for drafters: {method} has tokens of the text replaced as it learns, so "
            "that the target reads another text each time; leave it out."
        )


def _lessons(target: Loaded, text: TextFlags) -> Lessons | None:
    """Where what the target makes of the text is kept, if it is."""
    if text.lessons is None:
        return None
    from outpace.train.lessons import Lessons
    from outpace.train.origin import origin_of

    return Lessons(text.lessons, origin_of(target), int(text.cache * GIGABYTE))


def _settings(
    console: Console, method: str, model: ModelFlags, drafter: DrafterFlags, run: dict[str, Any]
) -> TrainSettings:
    with starting(console):
        from outpace.train.settings import TrainSettings
        from outpace.train.students.making import check_sizes
    given: dict[str, Any] = {"start": _start(method, drafter), "loss": _loss(method, drafter)}
    named = {name: value for name, value in given.items() if value is not None}
    named["draft"] = _draft(method, model, drafter)
    names = ("block", "batch", "steps", "learning_rate", "precision", "seed")
    settings = TrainSettings(
        method=method,
        head=drafter.head(),
        quantization=cast("Quantization | None", drafter.drafter_quantization),
        **{name: run[name] for name in names},
        **named,
    )
    check_sizes(settings)
    return settings


def _have_begun(settings: TrainSettings, folders: Iterable[Path]) -> bool:
    """Whether all runs go on, which then need not read what they began as; raises where one that
    begins could not."""
    from outpace.train.run import STATE
    from outpace.train.students.making import check_begin

    begun = all((folder / STATE).exists() for folder in folders)
    if not begun:
        check_begin(settings)
    return begun


def _start(method: str, drafter: DrafterFlags) -> str | None:
    """What the drafter begins as, if that is said."""
    from outpace.heads.registry import classifier_names
    from outpace.train.draft_model import DRAFT_MODEL, PRUNED, RANDOM

    start = drafter.start
    if start is not None and method in classifier_names():
        raise ConfigError(f"--start is for drafters, and {method} is none: leave it out.")
    if start in (PRUNED, RANDOM) and method != DRAFT_MODEL:
        raise ConfigError(
            f"--start {start} is for draft_model: a head begins as the one in a folder, or anew "
            "without --start."
        )
    return start


def _loss(method: str, drafter: DrafterFlags) -> str | None:
    """The loss of a draft model, if it is said."""
    if drafter.loss is not None and method != "draft_model":
        raise ConfigError("--loss is for draft_model; a head has none.")
    return drafter.loss


def _draft(method: str, model: ModelFlags, drafter: DrafterFlags) -> str:
    """The draft model of a classifier: the given one, or the bundled target's own; "" if none."""
    from outpace.api import BUNDLED
    from outpace.heads.registry import classifier_names

    if method in classifier_names():
        return drafter.draft or (str(BUNDLED / "drafter") if model.model is None else "")
    if drafter.draft is not None:
        raise ConfigError(f"--draft is for {' and '.join(classifier_names())}: leave it out.")
    return ""


@dataclass(frozen=True)
class _Training:
    """What the runs of one command share."""

    console: Console
    target: Loaded
    settings: TrainSettings
    flags: RunFlags
    curves: Curves
    ranks: Ranks

    def check(self, folders: Iterable[Path], begun: bool, thorough: bool) -> None:
        """Raises ``ConfigError`` for settings that do not fit the target, or a run that is to go
        on, before anything is read. thorough: also where that takes some seconds."""
        from outpace.train.run import check_goes_on
        from outpace.train.students.making import check_made

        for folder in folders:
            check_goes_on(folder, self.settings, self.target)
        with working(self.console, "checking the sizes"):
            check_made(self.target, self.settings, begun, thorough)

    def read(self, text: TextFlags, drafter: DrafterFlags) -> tuple[Tensor, Tensor | None]:
        """Returns the text that a drafter learns from, written before if it is the target's own."""
        from outpace.train.run import held_out

        found = _text(self.console, self.target, text, self.settings, drafter, self.ranks)
        held_out(len(found[0]), self.settings)
        return found

    def train_tasks(
        self,
        tasks: Mapping[str, tuple[TextFlags, DrafterFlags]],
        files: Mapping[str, Sequence[Path]],
        text: TextFlags,
        drafter: DrafterFlags,
    ) -> None:
        """Trains the router of several tasks, a drafter for each, and says how they are used."""
        if self.ranks.first:  # first of all, since it takes seconds
            train_router(self.console, self.target, files, text, self.settings.seed, drafter.out)
        self.train_each(tasks)
        if self.ranks.first:
            routes = write_routes(self.settings.method, files, drafter.out)
            _say(self.console, f"use them: --speculative-config {routes}")

    def train_each(self, tasks: Mapping[str, tuple[TextFlags, DrafterFlags]]) -> None:
        """Trains the drafters of all tasks, whose texts are read before the first one learns: one
        may turn out to be none."""
        read = {}
        for task, (text, drafter) in tasks.items():
            try:
                read[task] = self.read(text, drafter)
            except OutpaceError as error:
                raise ConfigError(f"--for {task}: {error}") from error
        for task, (text, drafter) in tasks.items():
            self.console.rule(task)
            self.train(read[task], text, drafter, task)

    def train(
        self,
        read: tuple[Tensor, Tensor | None],
        text: TextFlags,
        drafter: DrafterFlags,
        name: str,
    ) -> None:
        """Trains one drafter on what was `read`. name: of its curves."""
        from outpace.train.run import LOG, TrainingRun

        console, settings, flags = self.console, self.settings, self.flags
        tokens, own = read
        lessons = _lessons(self.target, text)
        preparing = f"preparing {settings.method}"
        with working(console, preparing, lines=False) as report:
            run = TrainingRun(
                self.target,
                tokens,
                settings,
                drafter.out,
                own=own,
                lessons=lessons,
                ranks=self.ranks,
                preparing=report if console.is_terminal else in_lines(console, preparing),
            )
        if run.step:
            console.print(_going_on(run, flags.patience))

        def draw(reached: Progress) -> None:
            self.curves.draw(name, drafter.out / LOG, reached.measure)

        every = flags.filled()["every"]
        try:
            reached = play(console, run, every, flags.minutes, flags.patience, draw)
        except KeyboardInterrupt:
            _say(console, _interrupted(run, drafter.out))
            raise
        draw(reached)  # also where there was nothing left to learn
        console.print(
            f"{reached.tokens:,} tokens in {reached.seconds / 60:.1f} minutes; {_kept(run)}"
        )
        if lessons is not None and lessons.full:
            console.print(
                "the lessons fill --cache: what is not among them is read again each time"
            )


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
    if run.kept is not None:
        return f"kept is step {run.kept.step:,}: {run.kept.sentence}"
    return f"kept is an earlier report of this run, with the figure {run.best:.2f}"


def _interrupted(run: TrainingRun, out: Path) -> str:
    """What an interrupted run leaves."""
    if run.written is None:
        return "interrupted before the first report: nothing is kept (--every makes them sooner)"
    return (
        f"interrupted; {_kept(run)}, in {out}. The same command goes on from step {run.written:,}."
    )


def _use(settings: TrainSettings, drafter: DrafterFlags) -> str:
    """How what was trained is asked for."""
    from outpace.heads.registry import classifier_names

    if settings.method not in classifier_names():
        return f"--method {settings.method} --draft {shlex.quote(str(drafter.out))}"
    key = "verify" if settings.method == "judge" else "length"
    named = {"name": settings.method, "head": str(drafter.out)}
    config = json.dumps({"model": settings.draft, key: named})
    return f"--speculative-config {shlex.quote(config)}"


def _target(console: Console, model: ModelFlags, sharing: Ranks | None) -> Loaded:
    """sharing: the processes that it is split over, if it is."""
    with starting(console):
        from outpace.api import BUNDLED
        from outpace.errors import PromptError
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
            from outpace.train.sharded import load_sharded

            del arguments["quantization"]  # nothing by now
            target = load_sharded(str(name), sharing, progress=report, **arguments)
    if target.tokenizer is None:
        raise PromptError(f"{target.name} has no tokenizer, so no text can be read for it.")
    return target


def _text(
    console: Console,
    target: Loaded,
    text: TextFlags,
    settings: TrainSettings,
    drafter: DrafterFlags,
    ranks: Ranks,
) -> tuple[Tensor, Tensor | None]:
    """Returns the blocks that are learned from, and which tokens are the target's own, where that
    is known."""
    from outpace.train.data import blocks, cut_written, documents

    if not text.self_distill:
        with working(console, "reading the text"):
            found = documents(text.data or [], target.tokenizer, target.name)
            return blocks(found, target.tokenizer, settings.block, text.tokens), None
    answers = written(console, target, text, settings.seed, drafter.out, ranks)
    return cut_written(answers, target.tokenizer.eos_token_id, settings.block, text.tokens)
