"""``outpace train``: a drafter for one target, or one for each of several tasks, trained on given
text or on the target's own."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

from outpace.cli.flags.grouped import grouped
from outpace.cli.flags.groups import ModelFlags
from outpace.cli.loading import starting
from outpace.cli.printing import say
from outpace.cli.train.answers import train_online
from outpace.cli.train.flags import (
    DrafterFlags,
    OnlineFlags,
    ProcessFlags,
    RunFlags,
    TextFlags,
)
from outpace.cli.train.launch import Launch, locked_folders
from outpace.cli.train.run import Curves, Training, load_target
from outpace.errors import ConfigError, OutpaceError

if TYPE_CHECKING:
    from outpace.targets.cpu.weights.quantize import Quantization
    from outpace.train.settings import TrainSettings

ROUTER, ROUTES = "router.npz", "routes.json"
EXAMPLES = 1000
"""Prompts of a task that the router learns from, at most."""


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
    text that it does not learn from; of a classifier, how many tokens it judges rightly.
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
            with locked_folders(console, model, drafter.out, [(text, drafter)], online=True):
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
    files = _files_of(method, text)
    settings = _settings(console, method, model, drafter, run.settings())
    _check_hidden_states(method, text)
    ranks.check(settings.batch)
    tasks = {task: _one_task(task, files, text, drafter) for task in files}
    runs = list(tasks.values()) or [(text, drafter)]
    folders = [made.out for _, made in runs]
    with locked_folders(console, model, drafter.out, runs, first=ranks.first):
        begun = _have_begun(settings, folders)
        texts = [*(text.data or []), *chain.from_iterable(files.values())]
        curves = Curves(console, run.png, texts, draws=ranks.first)
        model = launch.placed(model)
        with ranks.joined(model.device):
            target = load_target(console, model, ranks if processes.shard_target else None)
            training = Training(console, target, settings, run, curves, ranks)
            training.check(folders, begun, thorough=text.self_distill)
            if tasks:
                _train_tasks(training, tasks, files, text, drafter.out)
            else:
                training.train(training.read(text, drafter), text, drafter, method)
                say(console, f"use it: {_use(settings, drafter)}")


def _use(settings: TrainSettings, drafter: DrafterFlags) -> str:
    """How what was trained is asked for."""
    from outpace.heads.registry import CLASSIFIERS

    if settings.method not in CLASSIFIERS:
        return f"--method {settings.method} --draft {shlex.quote(str(drafter.out))}"
    key = "verify" if settings.method == "judge" else "length"
    named = {"name": settings.method, "head": str(drafter.out)}
    config = json.dumps({"model": settings.draft, key: named})
    return f"--speculative-config {shlex.quote(config)}"


# -- what the flags ask for ------------------------------------------------------------------------


def _settings(
    console: Console, method: str, model: ModelFlags, drafter: DrafterFlags, run: dict[str, Any]
) -> TrainSettings:
    with starting(console):
        from outpace.train.settings import TrainSettings
        from outpace.train.students import check_sizes
    given: dict[str, Any] = {"start": _start(method, drafter), "loss": _loss(method, drafter)}
    named = {name: value for name, value in given.items() if value is not None}
    named["draft"] = _draft(method, model, drafter)
    settings = TrainSettings(
        method=method,
        head=drafter.head(),
        quantization=cast("Quantization | None", drafter.drafter_quantization),
        **run,
        **named,
    )
    check_sizes(settings)
    return settings


def _have_begun(settings: TrainSettings, folders: Iterable[Path]) -> bool:
    """Whether all runs go on, which then need not read what they began as; raises where one that
    begins could not."""
    from outpace.train.checkpoint import STATE
    from outpace.train.students import check_begin

    begun = all((folder / STATE).exists() for folder in folders)
    if not begun:
        check_begin(settings)
    return begun


def _check_hidden_states(method: str, text: TextFlags) -> None:
    from outpace.heads.registry import CLASSIFIERS

    if text.hidden_states is not None and method in CLASSIFIERS:
        raise ConfigError(
            f"--hidden-states is for drafters: {method} has tokens of the text replaced as it "
            "learns, so that the target reads another text each time; leave it out."
        )


def _start(method: str, drafter: DrafterFlags) -> str | None:
    """What the drafter begins as, if that is said."""
    from outpace.heads.registry import CLASSIFIERS
    from outpace.train.draft_model import DRAFT_MODEL, PRUNED, RANDOM

    start = drafter.start
    if start is not None and method in CLASSIFIERS:
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
    from outpace.heads.registry import CLASSIFIERS
    from outpace.llm import BUNDLED

    if method in CLASSIFIERS:
        return drafter.draft or (str(BUNDLED / "drafter") if model.model is None else "")
    if drafter.draft is not None:
        raise ConfigError(f"--draft is for {' and '.join(CLASSIFIERS)}: leave it out.")
    return ""


# -- a drafter for each task or language, and a router among them ----------------------------------


def _files_of(method: str, text: TextFlags) -> dict[str, list[Path]]:
    """Returns the files of each task, {} without ``--for``; ``ConfigError`` for what names none."""
    if not text.tasks:
        return {}
    from outpace.heads.registry import CLASSIFIERS

    if method in CLASSIFIERS:
        raise ConfigError(f"--for is for drafters, and {method} is none: give its text as --data.")
    found: dict[str, list[Path]] = {}
    for entry in text.tasks:
        task, equals, file = entry.partition("=")
        if not (equals and file and re.fullmatch(r"[\w.+-]*\w[\w.+-]*", task)):
            raise ConfigError(
                f"--for must be TASK=FILE, not {entry!r}: a task has letters, digits, and - + . _, "
                "since its drafter's folder has its name."
            )
        if task in (ROUTER, ROUTES):
            raise ConfigError(
                f"--for {task}=...: a file in the drafters' folder has that name: choose another."
            )
        found.setdefault(task, []).append(Path(file))
    if len(found) == 1:
        raise ConfigError("--for needs two tasks or more: for a single one use --data.")
    return found


def _one_task(
    task: str, files: Mapping[str, Sequence[Path]], text: TextFlags, drafter: DrafterFlags
) -> tuple[TextFlags, DrafterFlags]:
    """Returns the flags of a task's own run. All of them share the disk that was allowed for."""
    hidden_states = None if text.hidden_states is None else text.hidden_states / task
    cache = text.cache / len(files)
    own = replace(
        text, tasks=None, data=list(files[task]), hidden_states=hidden_states, cache=cache
    )
    return own, replace(drafter, out=drafter.out / task)


def _train_tasks(
    training: Training,
    tasks: Mapping[str, tuple[TextFlags, DrafterFlags]],
    files: Mapping[str, Sequence[Path]],
    text: TextFlags,
    out: Path,
) -> None:
    """Trains the router of several tasks, which takes seconds, then a drafter for each, and says
    how they are used. All texts are read before the first drafter learns: one may turn out to be
    none."""
    console, first = training.console, training.ranks.first
    if first:
        _train_router(training, files, text, out)
    read = {}
    for task, (own, drafter) in tasks.items():
        try:
            read[task] = training.read(own, drafter)
        except OutpaceError as error:
            raise ConfigError(f"--for {task}: {error}") from error
    for task, (own, drafter) in tasks.items():
        console.rule(task)
        training.train(read[task], own, drafter, task)
    if first:
        routes = _write_routes(training.settings.method, files, out)
        say(console, f"use them: --speculative-config {routes}")


def _train_router(
    training: Training, files: Mapping[str, Sequence[Path]], text: TextFlags, out: Path
) -> None:
    """Trains the router on the prompts as they will be asked, with the chat template around them,
    and writes it; ``ConfigError`` where there are too few."""
    from outpace.heads.folder import saving
    from outpace.methods.choosers.classifier import TaskClassifier
    from outpace.train.answers import prompts

    target = training.target
    examples = {}
    for task, paths in files.items():
        found = prompts(paths, target.tokenizer, target.name, text.prompt_tokens)
        step = -(-len(found) // EXAMPLES)
        examples[task] = [
            target.tokenizer.decode(ids, skip_special_tokens=True) for ids in found[::step]
        ]
    made = TaskClassifier.trained(examples, training.settings.seed)
    out.mkdir(parents=True, exist_ok=True)
    with saving(out / ROUTER):
        made.save(out / ROUTER)
    training.console.print(
        f"router: {made.accuracy:.0%} of {sum(map(len, examples.values())):,} prompts recognised "
        "when they were left out"
    )


def _write_routes(method: str, tasks: Iterable[str], out: Path) -> Path:
    """Writes the ``speculative_config`` that drafts for each prompt with its task's drafter, and
    for prompts of no known task with a look-up."""
    from outpace.heads.folder import saving

    folder = out.resolve()
    config = {
        "method": "task",
        "router": str(folder / ROUTER),
        "routes": {task: {"method": method, "model": str(folder / task)} for task in tasks},
        "default": {"method": "suffix"},
    }
    with saving(out / ROUTES):
        (out / ROUTES).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return out / ROUTES
